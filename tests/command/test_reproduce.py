"""A run run again: the same bits, or the first number that differs and what has changed since."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.assets import ROOT
from tests.harness.runs import SMALL, Ended, FinishedRuns, Zygote, content_of, metrics, numbers

SHORT = (*SMALL, "eval.samples=0", "training.max_steps=6")


@pytest.fixture
def folder(finished: FinishedRuns, tmp_path: Path) -> Path:
    """Copies of a finished run and of the rows that it was trained on."""
    finished.copy(tmp_path / "run")
    shutil.copy(ROOT / "sample" / "train.jsonl", tmp_path / "rows.jsonl")
    set_in_run_yaml(tmp_path, "dataset", path="rows.jsonl")
    return tmp_path


def again(zygote: Zygote, folder: Path, *given: str) -> tuple[Ended, dict[str, Any]]:
    ended = zygote.run(folder, "run=run", *given, module="app.reproduce")
    file = folder / "run-reproduced" / "reproduce.json"
    return ended, json.loads(file.read_text()) if file.exists() else {}


def change(file: Path, edit: Callable[[Any], None]) -> None:
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def set_in_run_yaml(folder: Path, section: str, **values: Any) -> None:
    file = folder / "run" / "run.yaml"
    settings = yaml.safe_load(file.read_text())
    settings[section] |= values
    file.write_text(yaml.safe_dump(settings))


def test_reproduce_gives_the_same_bits(zygote: Zygote, folder: Path) -> None:
    check_same_bits(zygote, folder)


def check_same_bits(zygote: Zygote, folder: Path) -> None:
    before = content_of(folder / "run")
    ended, found = again(zygote, folder)
    assert (ended.code, ended.stderr) == (0, "")
    assert content_of(folder / "run") == before
    assert numbers(folder / "run-reproduced") == numbers(folder / "run")
    assert "origin  same versions, commit, hardware, rows, tokenizer and base" in ended.stdout
    assert re.search(r"result  agrees, \d+ lines up to step \d, bit-identical", ended.stdout)
    lines = metrics(folder / "run")
    assert found == {
        "run": "run",
        "agrees": True,
        "tolerance": 0.0,
        "same_bits": True,
        "lines": len(lines),
        "last_step": lines[-1]["step"],
        "first_difference": None,
        "largest_difference": None,
        "origin": [],
    }


def change_a_loss(run: Path) -> None:
    lines = metrics(run)
    lines[2]["loss"] *= 1.001
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_reproduce_names_the_first_difference(zygote: Zygote, folder: Path) -> None:
    change_a_loss(folder / "run")
    change(folder / "run" / "manifest.json", lambda manifest: manifest["packages"].update(torch="2.9.0"))
    ended, found = again(zygote, folder, "steps=2")
    assert (ended.code, ended.stderr) == (3, "")
    assert "torch: 2.9.0 then, " in ended.stdout
    assert ended.stdout.index("torch: 2.9.0") < ended.stdout.index("step 1/"), "told before it starts"
    assert "result  differs, 4 lines up to step 2\n        first:   loss at step 2: " in ended.stdout
    assert found["last_step"] == 2
    assert found["first_difference"]["relative"] == pytest.approx(1e-3, rel=1e-2)
    assert found["largest_difference"] == found["first_difference"]
    assert [each["name"] for each in found["origin"]] == ["torch"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("run=bare",), "bare/run.yaml cannot be read as the configuration of a run"),
        (("run=run", "seed=3"), "seed does not apply, because a run is reproduced with its own settings"),
        (("run=run", "output_dir=bare"), "output_dir=bare is not empty."),
    ],
)
def test_reproduce_errors_come_before_loading(
    zygote: Zygote, folder: Path, given: tuple[str, ...], message: str
) -> None:
    (folder / "bare").mkdir()
    (folder / "bare" / "mine.txt").touch()
    before = content_of(folder / "run")
    ended = zygote.refused(folder, *given, module="app.reproduce", message=message)
    assert ended.stdout == ""
    assert content_of(folder / "run") == before
    assert not (folder / "run-reproduced").exists()
