"""A run run again: the same bits, or the first number that differs and what has changed since."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.assets import ROOT
from tests.command.test_resume import SMALL
from tests.command.test_wrong_inputs import content_of, refused
from tests.conftest import RunApp
from tests.runs import Ended, Zygote, metrics, numbers

SHORT = (*SMALL, "eval.samples=0", "training.max_steps=6")


@pytest.fixture(scope="module")
def first(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a file of its own; the tests work on copies of the folder round it."""
    folder = tmp_path_factory.mktemp("first")
    shutil.copy(ROOT / "sample" / "train.jsonl", folder / "rows.jsonl")
    given = (*SHORT, "dataset.path=rows.jsonl", "training.max_steps=3")
    ended = zygote.run(folder, *given, "output_dir=run")
    assert ended.code == 0, ended.stderr
    return folder


@pytest.fixture
def folder(first: Path, tmp_path: Path) -> Path:
    shutil.copytree(first, tmp_path, dirs_exist_ok=True)
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


@pytest.mark.parametrize(
    ("recipe", "more"), [("qlora", "adapter.dropout=0.1"), ("full", "batching.packing=false")]
)
def test_it_gives_the_same_bits_and_leaves_the_first_as_it_was(
    zygote: Zygote, tmp_path: Path, recipe: str, more: str
) -> None:
    ended = zygote.run(tmp_path, *SHORT, f"recipe={recipe}", more, "output_dir=run", "training.max_steps=4")
    assert ended.code == 0, ended.stderr
    before = content_of(tmp_path / "run")
    ended, found = again(zygote, tmp_path)
    assert (ended.code, ended.stderr) == (0, "")
    assert content_of(tmp_path / "run") == before
    assert numbers(tmp_path / "run-reproduced") == numbers(tmp_path / "run")
    assert "origin  versions, commit, hardware, rows, tokenizer and base are the same" in ended.stdout
    assert "result  agrees, 6 lines up to step 4, to the last bit" in ended.stdout
    assert found == {
        "run": "run",
        "agrees": True,
        "tolerance": 0.0,
        "same_bits": True,
        "lines": 6,
        "last_step": 4,
        "first_difference": None,
        "largest_difference": None,
        "origin": [],
    }


def test_a_run_that_was_stopped_and_resumed_is_reproduced_in_one_go(zygote: Zygote, tmp_path: Path) -> None:
    command = (*SHORT, "record.every=2", "eval.every=0", "output_dir=run", "resume=auto")
    assert zygote.run(tmp_path, *command, "training.stop_after=3").code == 75
    unfinished, found = again(zygote, tmp_path)
    assert unfinished.code == 0, unfinished.stderr
    assert (found["lines"], found["last_step"]) == (3, 3)
    shutil.rmtree(tmp_path / "run-reproduced")

    assert zygote.run(tmp_path, *command, "training.stop_after=3").code == 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 6, 6]
    ended, found = again(zygote, tmp_path)
    assert ended.code == 0, ended.stderr
    assert [line["step"] for line in metrics(tmp_path / "run-reproduced")] == [1, 2, 4, 6, 6]
    assert (found["same_bits"], found["lines"], found["last_step"]) == (True, 5, 6)


def test_the_first_number_that_differs_is_named(zygote: Zygote, folder: Path) -> None:
    lines = metrics(folder / "run")
    lines[1]["loss"] *= 1.001
    (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    change(folder / "run" / "manifest.json", lambda manifest: manifest["packages"].update(torch="2.9.0"))
    ended, found = again(zygote, folder, "steps=2")
    assert (ended.code, ended.stderr) == (3, "")
    assert "torch: 2.9.0 then, " in ended.stdout
    assert ended.stdout.index("torch: 2.9.0") < ended.stdout.index("step 1/"), "told before it starts"
    assert "result  differs, 3 lines up to step 2\n        first: loss of step 2, " in ended.stdout
    assert found["last_step"] == 2
    assert found["first_difference"]["relative"] == pytest.approx(1e-3, rel=1e-2)
    assert found["largest_difference"] == found["first_difference"]
    assert [each["name"] for each in found["origin"]] == ["torch"]
    (folder / "run-reproduced").rename(folder / "before")
    near, found = again(zygote, folder, "steps=2", "tolerance=0.01")
    assert near.code == 0, near.stderr
    assert "\nstopped after step 2, which is saved.\n" in near.stdout
    assert "To go on" not in near.stdout, "nothing to go on with"
    assert "\nresult  agrees" in near.stdout
    assert (found["agrees"], found["same_bits"]) == (True, False)


def test_other_rows_are_refused_and_run_only_anyway(zygote: Zygote, folder: Path) -> None:
    rows = (folder / "rows.jsonl").read_text().splitlines(keepends=True)
    (folder / "rows.jsonl").write_text("".join(rows[1:]))
    ended, _ = again(zygote, folder)
    assert ended.code == 2
    assert "error: run=run: rows to train on: " in ended.stderr
    assert "anyway=true" in ended.stderr
    assert not (folder / "run-reproduced").exists()
    (folder / "moved.jsonl").write_text("".join(rows))
    moved, found = again(zygote, folder, "dataset.path=moved.jsonl", "steps=1")
    assert (moved.code, found["same_bits"]) == (0, True), moved.stderr
    shutil.rmtree(folder / "run-reproduced")
    anyway, found = again(zygote, folder, "anyway=true", "steps=1")
    assert (anyway.code, anyway.stderr) == (3, "")
    assert [each["name"] for each in found["origin"]] == ["rows to train on"]


def test_the_number_of_threads_is_that_of_the_first(zygote: Zygote, folder: Path) -> None:
    """Left to the machine, it would be that of its cores, and the last bits might move."""
    set_in_run_yaml(folder, "launch", threads=None)
    change(folder / "run" / "manifest.json", lambda manifest: manifest["choices"].update(threads=3))
    again(zygote, folder, "steps=1")
    manifest = json.loads((folder / "run-reproduced" / "manifest.json").read_text())
    assert manifest["choices"]["threads"] == 3


def test_a_run_that_ends_sooner_than_the_first_does_not_agree(zygote: Zygote, folder: Path) -> None:
    """Equal lines say nothing of those that never came."""
    set_in_run_yaml(folder, "training", max_steps=2)
    set_in_run_yaml(folder, "schedule", kind="constant", warmup_fraction=0.0)
    shorter, _ = again(zygote, folder)
    assert shorter.code == 3, shorter.stderr
    lines = [*metrics(folder / "run-reproduced"), {"step": 3, "loss": 1.0}]
    shutil.rmtree(folder / "run-reproduced")
    (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ended, found = again(zygote, folder)
    assert ended.code == 3
    assert (found["agrees"], found["first_difference"], found["last_step"]) == (False, None, 2)
    assert "result  differs, 3 lines up to step 2, to the last bit\n        it ended there; " in ended.stdout


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("run=none",), "run=none: there is no such folder."),
        (("run=bare",), "bare/run.yaml cannot be read as the configuration of a run"),
        (("run=run", "step=3"), "step is not a key. Did you mean steps?"),
        (("run=run", "seed=3"), "seed does not apply, because a run is reproduced with its own settings"),
        (("run=run", "output_dir=bare"), "output_dir=bare: there is something already."),
        (("run=run", "tolerance=-1"), "tolerance=-1.0 must be at least 0."),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_loaded(
    run_app: RunApp, folder: Path, given: tuple[str, ...], message: str
) -> None:
    (folder / "bare").mkdir()
    (folder / "bare" / "mine.txt").touch()
    before = content_of(folder)
    ended = run_app(*given, module="app.reproduce")
    refused(ended.returncode, ended.stdout, ended.stderr, message)
    assert ended.stdout == ""
    assert content_of(folder) == before
