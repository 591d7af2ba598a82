"""docs/config.md tells the groups that there are, and the defaults that conf/ has."""

import re
from collections.abc import Iterator
from functools import reduce
from typing import Any

import pytest
import yaml

from app.config.groups import CONF
from app.config.load import compose_run
from app.config.schema import RunConfig
from app.config.validate import is_key
from tests.conftest import REPO

_NOT_VALUES = ("of ", "all ", "`runs/", "the tokenizer's")  # told in words


def _rows(heading: str) -> list[tuple[str, str]]:
    """The first two cells of the table below a heading."""
    text = (REPO / "docs" / "config.md").read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(cell[0], cell[1]) for cell in cells]


def _defaults() -> Iterator[tuple[str, str]]:
    """`eval.every`, `.samples` | 100, 4 gives two."""
    for keys, values in _rows("The keys most used"):
        section = ""
        told = [value.strip() for value in values.split(",")]
        names = re.findall(r"`([^`]+)`", keys)
        if not values or values.startswith("see") or len(told) != len(names):
            continue
        for name, value in zip(names, told, strict=True):
            section = section if name.startswith(".") else name.rpartition(".")[0]
            if not value.startswith(_NOT_VALUES):
                yield f"{section}{name}" if name.startswith(".") else name, value


@pytest.mark.parametrize(("key", "told"), list(_defaults()))
def test_a_default_is_that_of_conf(key: str, told: str) -> None:
    found: Any = reduce(getattr, key.split("."), compose_run([]))
    found = getattr(found, "kind", found)  # of a group its choice
    wanted = {"all linear layers": ["all-linear"]}.get(told, yaml.safe_load(told))
    assert found == wanted


def test_most_defaults_are_read() -> None:
    told = dict(_defaults())
    assert {"eval.samples", "adapter.r", "checkpoint.final", "record.every", "seed"} <= told.keys()
    assert len(told) > 20


def test_every_choice_of_every_group_is_told() -> None:
    told = {}
    for groups, choices in _rows("Groups"):
        for group, part in zip(re.findall(r"`([^`]+)`", groups), choices.split(";"), strict=False):
            told[group] = set(re.findall(r"`([^`]+)`", part if "," in groups else choices))
    files = {
        folder.name: {file.stem for file in folder.glob("*.yaml") if not file.stem.startswith("_")}
        for folder in CONF.iterdir()
        if folder.is_dir()
    }
    left_out = {"model": {"folder"}}  # model.path= chooses it
    missing = {
        group: names - told.get(group, set()) - left_out.get(group, set()) for group, names in files.items()
    }
    assert {group: names for group, names in missing.items() if names} == {}


def test_keys_set_beside_those_of_other_programs_exist() -> None:
    text = (REPO / "docs" / "coming-from.md").read_text().partition("## Settings\n")[2].partition("\n## ")[0]
    cells = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    section, keys = "", []
    for name in re.findall(r"`([a-z_.]+)", cells):
        section = section if name.startswith(".") else name.rpartition(".")[0]
        keys.append(f"{section}{name}" if name.startswith(".") else name)
    groups = {folder.name for folder in CONF.iterdir() if folder.is_dir()}
    assert [key for key in keys if key not in groups and not is_key(RunConfig, key)] == []
    assert len(keys) > 30
