"""A run is one chain of values: the functions that make it read from top to bottom, and bind each name once."""

import ast
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import app
from app.training.plan import make_plan
from app.training.rows import read_rows
from app.training.run import train_in

MAX_STATEMENT_LINES = 30
_SCOPES = (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def syntax_of(function: Callable[..., Any]) -> ast.FunctionDef:
    (tree,) = ast.parse(inspect.getsource(inspect.unwrap(function))).body
    assert isinstance(tree, ast.FunctionDef)
    return tree


def bound_in(tree: ast.FunctionDef) -> Iterator[str]:
    """Every name that the body binds, as often as it does; not those of comprehensions and inner functions."""
    parts = list[ast.AST](tree.body)
    while parts:
        part = parts.pop()
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id
        if not isinstance(
            part, ast.FunctionDef | ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
        ):
            parts += ast.iter_child_nodes(part)


@pytest.mark.parametrize("function", [train_in, read_rows, make_plan])
def test_functions_of_the_chain_bind_each_name_once(function: Callable[..., Any]) -> None:
    tree = syntax_of(function)
    arguments = [each.arg for each in (*tree.args.args, *tree.args.kwonlyargs)]
    assert [name for name, count in Counter([*arguments, *bound_in(tree)]).items() if count > 1] == []


def test_train_in_is_short() -> None:
    _documentation, first, *_ = (tree := syntax_of(train_in)).body
    assert tree.end_lineno is not None
    assert tree.end_lineno - first.lineno < MAX_STATEMENT_LINES


def test_base_is_described_in_one_place() -> None:
    files = [file for file in Path(app.__file__).parent.rglob("*.py") if "BaseModel(" in file.read_text("utf-8")]
    assert [file.name for file in files] == ["base_model.py"]
