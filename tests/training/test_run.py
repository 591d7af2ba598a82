"""A run as one chain of values, and the commands that its last lines print."""

import ast
import inspect
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import app
from app.config.finished_run import finished_folder
from app.config.schema import DatasetConfig, TaskConfig
from app.errors import CheckpointError
from app.tracking.output_dir import RunFolder
from app.training.checkpoint import Progress
from app.training.plan import make_plan
from app.training.rows import read_rows
from app.training.run import train_in
from app.training.summary import closing_facts

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
    arguments = [argument.arg for argument in (*tree.args.args, *tree.args.kwonlyargs)]
    assert [name for name, count in Counter([*arguments, *bound_in(tree)]).items() if count > 1] == []


def test_train_in_is_short() -> None:
    _documentation, first, *_ = (tree := syntax_of(train_in)).body
    assert tree.end_lineno is not None
    assert tree.end_lineno - first.lineno < MAX_STATEMENT_LINES


def test_base_is_described_in_one_place() -> None:
    files = [file for file in Path(app.__file__).parent.rglob("*.py") if "BaseModel(" in file.read_text("utf-8")]
    assert [file.name for file in files] == ["base_model.py"]


def test_closing_facts_scores_and_command(tmp_path: Path) -> None:
    model = SimpleNamespace(trust_remote_code=False, vocab_size=None)
    dataset = DatasetConfig(eval_path=None, eval_split=None, eval_fraction=0.0)
    run: Any = SimpleNamespace(
        adapter=SimpleNamespace(kind="lora"), model=model, task=TaskConfig(kind="causal"), dataset=dataset
    )
    start = {"eval_loss": 2.0, "exact_match": 0.0}
    progress: Any = Progress(step=1, first_loss=2.0, last_loss=1.0, last_eval_loss=0.5, start_metrics=start)
    folder = RunFolder(tmp_path / "a b")
    result = {"memory_predicted_bytes": 2e6, "memory_measured_bytes": 1.9e6, "peak_memory_bytes": 9e8}
    progress.metrics = {"eval_loss": 0.5, "exact_match": 0.9424}
    facts = dict(closing_facts(run, folder, result, progress))
    scores = "eval loss 0.5000, exact match 94.24% (was 0.00%); the run was already complete"
    assert facts["done"] == f"1 step, loss 2.0000 -> 1.0000, {scores}"
    smoothed = dict(closing_facts(run, folder, {**result, "train_loss": 1.25}, progress))
    assert smoothed["done"] == f"1 step, loss 2.0000 -> 1.2500, {scores}"
    assert facts["adapter"] == str(folder.final)
    assert facts["memory"].startswith("tensors: 2 MB estimated, 2 MB measured")
    assert shlex.split(facts["Try it:"]) == ["finetune", "generate", f"run={folder.path}", "prompt=..."]
    model.trust_remote_code, progress.metrics = True, {}
    start["chosen_log_probability"] = -1.0  # of rows that this start does not hold out
    assert "model.trust_remote_code=true prompt=" in dict(closing_facts(run, folder, result, progress))["Try it:"]
    run.task.kind, model.trust_remote_code = "masked", False  # it answers nothing
    result |= {"tokens_per_second": 5200.4, "samples_per_second": 8.861, "seconds": 57.82}
    facts = dict(closing_facts(run, folder, result, progress))
    assert facts["speed"] == "5,200 tokens/s, 8.86 samples/s, 57.8 s"
    assert "data" not in facts
    result |= {"forward_seconds": 0.2, "backward_seconds": 0.4, "optimizer_seconds": 0.1, "data_seconds": 0.3}
    assert dict(closing_facts(run, folder, result, progress))["data"].startswith("waiting for data takes 30% of each")
    result["data_seconds"] = 0.035
    assert "data" not in dict(closing_facts(run, folder, result, progress))
    assert "GPU" not in facts
    result |= {"device_used_bytes": 4.9e9, "other_processes": {"count": 1, "bytes": 19e9}}  # type: ignore[dict-item]
    facts = dict(closing_facts(run, folder, result, progress))
    assert facts["GPU"] == "peak 4.9 GB by this run, 19.0 GB by 1 other process"
    result |= {"device_is_estimated": True, "gpu_utilization": 0.937}
    result |= {"other_processes": {"count": 0, "bytes": 4e6}}  # type: ignore[dict-item]
    facts = dict(closing_facts(run, folder, result, progress))
    assert facts["GPU"] == "peak 4.9 GB by this run (estimated), utilization 94%"
    assert shlex.split(facts["Try it:"]) == ["finetune", "evaluate", f"run={folder.path}", "dataset.path=..."]
    dataset.eval_fraction = 0.1
    assert dict(closing_facts(run, folder, result, progress))["Try it:"].endswith(f"{folder.path}'")


def test_unfinished_run_command_quoted(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    with pytest.raises(CheckpointError) as refusal:
        finished_folder(f"{tmp_path}/a b")
    assert f"'output_dir={tmp_path}/a b'" in str(refusal.value)
