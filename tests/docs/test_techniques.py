"""docs/techniques.md: rungs are those of the ladders, figures those of kept tables."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from app.sweeps.search_space import read_preset
from scripts import make_techniques
from scripts.make_techniques import typed
from tests.conftest import REPO

ROWS = make_techniques.ROWS
KEPT = sorted((REPO / "docs" / "benchmarks" / "ladders").glob("*.json"))
FIGURE = re.compile(r"\d\s*(%|x\b(?! \d)|[kMG]B\b|samples|tokens/s|times)")


@pytest.mark.parametrize("row", [row for row in ROWS if "rung" in row], ids=lambda row: row["rung"])
def test_rung_is_of_its_ladder(row: Mapping[str, Any]) -> None:
    name, _, own = row["rung"].partition("/")
    assert {own, row.get("over", own)} <= read_preset([f"sweep={name}"]).config.rungs.keys()


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.stem)
def test_kept_table_has_the_rungs_of_its_ladder_and_no_paths(file: Path) -> None:
    rungs = json.loads(file.read_text())["rungs"]
    assert [rung["name"] for rung in rungs] == list(read_preset([f"sweep={file.name.split('.')[0]}"]).config.rungs)
    assert not re.search(r"/(home|tmp|root|work)/", file.read_text())


def test_figures_are_of_kept_tables() -> None:
    """Planned ones stand in the tables as they are; those written by hand are claims of sources alone."""
    tables = (REPO / "docs" / "benchmarks" / "ladders.md").read_text()
    planned = [make_techniques.planned(row) for row in ROWS]
    figures = {f"{each} GB" for text in planned for each in re.findall(r"\d+\.\d", text)}
    assert len(figures) > 5
    assert {figure for figure in figures if f"| {figure} |" not in tables} == set()
    by_hand = [f"{row.get('does', '')} {row.get('note', '')}" for row in ROWS]
    assert [text for text in by_hand if FIGURE.search(text)] == []


def test_what_waits_for_a_gpu_is_listed() -> None:
    listed = (REPO / "docs" / "benchmarks" / "unproven.md").read_text()
    assert [row["gpu"] for row in ROWS if row.get("gpu", "") not in listed] == []


def test_measured_table_kept_without_its_folder(tmp_path: Path) -> None:
    rungs = [
        {"name": "adamw", "tokens_per_second": 200.0, "splits": 0, "status": "finished"},
        {"name": "adamw_8bit", "tokens_per_second": 150.0, "splits": 0, "status": "finished"},
    ]
    content = {
        "command": ["finetune", "train", "-m", "sweep=optimizers", f"output_dir={tmp_path}"],
        "ladder": {"source": "a paper", "rungs": rungs},
        "trials": [{"folder": str(tmp_path)}],
    }
    (tmp_path / "sweep.json").write_text(json.dumps(content))
    facts = {"hardware": {"gpu": "NVIDIA H200"}, "choices": {"threads": 2}, "packages": {"torch": "2.13"}}
    (tmp_path / "01-adamw").mkdir()
    (tmp_path / "01-adamw" / "manifest.json").write_text(json.dumps(facts))
    kind, table = make_techniques.ladder_table(tmp_path)
    assert (kind, table["machine"]) == ("measured.h200", "NVIDIA H200, threads: 2; torch 2.13")
    assert table["command"] == "finetune train -m sweep=optimizers"
    assert str(tmp_path) not in json.dumps(table)
    rungs[1]["disturbances"] = ["other programs used 60% of the CPU"]
    (tmp_path / "sweep.json").write_text(json.dumps(content))
    with pytest.raises(SystemExit, match="adamw_8bit: other programs used 60% of the CPU"):
        make_techniques.ladder_table(tmp_path)
    plan = {"sweep": "optimizers", "label": "H100", "source": "", "rungs": [], "seconds": 1.2, "stops": []}
    (tmp_path / "check.json").write_text(json.dumps({"ladder": plan}))
    assert make_techniques.ladder_table(tmp_path) == ("planned", {"label": "H100", "source": "", "rungs": []})


@pytest.mark.parametrize("row", ROWS, ids=typed)
def test_cell_with_the_opposite_sign_of_its_claim_has_a_reason(row: Mapping[str, Any]) -> None:
    """A reason without such a cell is stale."""
    assert bool(make_techniques.contradictions(row)) == ("why" in row)


CLAIMS: list[tuple[dict[str, Any], float, list[str]]] = [
    ({"speed": "yes"}, 90.0, ["h200: 0.90 x `plain`"]),
    ({"speed": "yes"}, 120.0, []),
    ({"speed": "no"}, 120.0, ["h200: 1.20 x `plain`"]),
    ({}, 90.0, ["h200: 0.90 x `plain`"]),
    ({}, 120.0, []),
    ({"speed": "yes"}, 99.0, []),  # smaller than the tolerance
]


@pytest.mark.parametrize(("row", "speed", "cells"), CLAIMS)
def test_contradictions_compare_measured_signs_with_claims(
    row: dict[str, Any], speed: float, cells: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {
        "claimed": [{"name": "plain", "samples/s": 8.0}, {"name": "fast", "samples/s": 12.0}],
        "measured.h200": [{"name": "plain", "tokens_per_second": 100.0}, {"name": "fast", "tokens_per_second": speed}],
    }
    monkeypatch.setattr(make_techniques, "machines", lambda: ["h200"])
    monkeypatch.setattr(make_techniques, "table", lambda _name, kind: {"rungs": tables.get(kind, [])})
    assert make_techniques.contradictions({"technique": "fast", "rung": "ladder/fast", **row}) == cells


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        ({"tokens_per_second": 200.0}, {"tokens_per_second": 150.0}, "0.75 x `first`"),
        ({"tokens_per_second": 200.0, "spread": 0.3}, {"tokens_per_second": 150.0}, "~0.75 x `first`"),
        ({"tokens_per_second": 200.0}, {"tokens_per_second": 150.0, "no_ratio": "shared GPU"}, "-"),
        ({"tokens_per_second": 200.0}, {"status": "refused"}, "not supported there"),
        ({}, {}, "-"),
    ],
)
def test_speed_relative_to_another_rung(before: dict[str, Any], after: dict[str, Any], shown: str) -> None:
    assert make_techniques.relative_speed({"name": "first", **before}, {"name": "second", **after}) == shown
