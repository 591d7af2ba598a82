import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.tracking.output_dir import StepLog, finite_or_none, read_lines, smoothed_loss, with_smoothed_loss

STEP = {
    "step": 5,
    "epoch": 0.125,
    "loss": 1.0986122886681098,
    "lr": 0.0002,
    "grad_norm": 0.1 + 0.2,
    "tokens": 40960,
    "trained_tokens": 12345,
    "tokens_per_second": 1234.5,
    "peak_memory_bytes": 1073741824,
}


def written(path: Path, *steps: int) -> StepLog:
    lines = StepLog(path)
    for step in steps:
        lines.write({"step": step, "loss": step / 3})
    return lines


def test_step_log_line_format(tmp_path: Path) -> None:
    lines = StepLog(tmp_path / "metrics.jsonl")
    lines.write(STEP)
    lines.write({"step": 5, "epoch": 0.125, "eval_loss": 1.5})
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 5, "epoch": 0.125, "loss": 1.0986122886681098, "lr": 0.0002, '
        '"grad_norm": 0.30000000000000004, "tokens": 40960, "trained_tokens": 12345, '
        '"tokens_per_second": 1234.5, "peak_memory_bytes": 1073741824}\n'
        '{"step": 5, "epoch": 0.125, "eval_loss": 1.5}\n'
    )


@given(numbers=st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False) | st.integers()))
def test_step_log_numbers_round_trip(numbers: dict[str, float], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("lines") / "metrics.jsonl"
    values = {**numbers, "step": 1}
    StepLog(path).write(values)
    assert list(read_lines(path)) == [values]
    assert [repr(value) for value in next(read_lines(path)).values()] == [repr(value) for value in values.values()]


def test_step_log_non_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    StepLog(path).write({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "lr": 0.1})
    assert json.loads(path.read_text()) == {"step": 1, "loss": None, "grad_norm": None, "lr": 0.1}
    assert finite_or_none(-float("inf")) is None


@pytest.mark.parametrize(("step", "left"), [(4, [2, 4]), (5, [2, 4]), (6, [2, 4, 6]), (100, [2, 4, 6]), (-1, [])])
def test_step_log_truncate_after_step(step: int, left: list[int], tmp_path: Path) -> None:
    lines = written(tmp_path / "metrics.jsonl", 2, 4, 6)
    assert [values["step"] for values in lines.truncate_after(step)] == left
    assert [values["step"] for values in read_lines(lines.path)] == left


@pytest.mark.parametrize(
    "torn", ['{"step": 3, "lo', '{"step": 3, "loss": 1}', "\x00\x00\x00", "[1]\n", '{"loss": 1}\n']
)
def test_step_log_torn_line_removed(torn: str, tmp_path: Path) -> None:
    lines = written(tmp_path / "metrics.jsonl", 1, 2)
    whole = lines.path.read_bytes()
    with lines.path.open("a") as file:
        file.write(torn)
    assert [values["step"] for values in read_lines(lines.path)] == [1, 2]
    lines.truncate_after(10)
    assert lines.path.read_bytes() == whole
    lines.write({"step": 3})
    assert lines.path.read_bytes() == whole + b'{"step": 3}\n'


@pytest.mark.parametrize("text", ["a\u2028b\x85c\x0bd\re", "Übung 日本", "\ud800 alone", "tab\tline\n"])
def test_step_log_any_text_round_trip(text: str, tmp_path: Path) -> None:
    lines = StepLog(tmp_path / "samples.jsonl")
    lines.write({"step": 1, "answer": text})
    lines.write({"step": 2, "answer": text})
    assert lines.truncate_after(1) == [{"step": 1, "answer": text}]
    assert list(read_lines(lines.path)) == [{"step": 1, "answer": text}]


def lines(count: int) -> list[dict[str, Any]]:
    return [{"step": step, "loss": float(step)} for step in range(1, count + 1)]


@pytest.mark.parametrize(
    ("logged", "expected"),
    [
        ([], None),
        ([{"step": 0, "eval_loss": 2.0}, {"step": 1, "loss": None}], None),
        (lines(2), 2.0),
        (lines(8), 6.5),
        (lines(50), 45.5),
        ([*lines(50), {"step": 50, "eval_loss": 2.0}, {"step": 51, "loss": None}], 45.5),
        (lines(300), 285.5),
        (lines(2000), 1950.5),
    ],
    ids=["none", "not finite", "one of two", "half", "ten", "with others", "a tenth", "a hundred"],
)
def test_smoothed_loss_is_the_mean_of_the_last_tenth(logged: list[dict[str, Any]], expected: float | None) -> None:
    assert smoothed_loss(logged) == expected


def test_with_smoothed_loss_ends_at_the_step_of_the_result(tmp_path: Path) -> None:
    file = StepLog(tmp_path / "metrics.jsonl")
    for line in lines(60):
        file.write(line)
    result = {"steps": 50, "train_loss_last": 50.0}
    assert with_smoothed_loss(result, file.path) == {**result, "train_loss": 45.5}
    combined = {"steps": 50, "train_loss_last": None}
    assert with_smoothed_loss(combined, file.path) == {**combined, "train_loss": None}
    assert with_smoothed_loss(result, tmp_path / "missing") == {**result, "train_loss": None}
