"""A run run again: the same bits, or the first number that differs and what has changed since."""

import shutil
from pathlib import Path

from tests.command.test_reproduce import SHORT, again, check_same_bits, folder
from tests.harness.runs import Zygote, metrics

__all__ = ["folder"]  # a fixture


def test_reproduce_a_resumed_run_in_one_start(zygote: Zygote, tmp_path: Path) -> None:
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


def test_reproduce_refuses_other_rows(zygote: Zygote, folder: Path) -> None:
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


def test_reproduce_gives_the_same_bits(zygote: Zygote, tmp_path: Path) -> None:
    zygote.run(
        tmp_path, *SHORT, "recipe=qlora", "adapter.dropout=0.1", "output_dir=run", "training.max_steps=4", code=0
    )
    check_same_bits(zygote, tmp_path)
