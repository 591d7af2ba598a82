"""A kind has entries in the tables that tests of it name, and in no other table of the program."""

import importlib
import pkgutil
import sys
from collections.abc import Mapping

import pytest

import app
from tests.promise.conftest import TABLES

EXAMPLES = {
    "adapter": "lora",
    "attention": "sdpa",
    "export": "merged",
    "metric": "perplexity",
    "preference loss": "ipo",
    "problem": "multi",
    "quantization": "llm_int8",
    "row format": "sharegpt",
    "task": "classification",
}


@pytest.mark.parametrize("kind", TABLES)
def test_tables_of_a_kind_are_all_that_have_an_entry_for_it(kind: str) -> None:
    for module in pkgutil.walk_packages(app.__path__, "app."):
        importlib.import_module(module.name)
    modules = [module for name, module in sys.modules.items() if name.startswith("app.")]
    tables = {
        f"{module.__name__}.{name}": each
        for module in modules
        for name, each in vars(module).items()
        if isinstance(each, Mapping) and EXAMPLES[kind] in each
    }
    own = {id(table) for table in TABLES[kind].values()}
    assert [name for name, table in tables.items() if id(table) not in own] == []
    for name, table in TABLES[kind].items():
        assert tables[name] is table
