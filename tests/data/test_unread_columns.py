"""Columns that are not read: which stop a run, the commands that mend it, and which are only told."""

import re
import shlex
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app.config.dataset_schema import MixSource
from app.config.load import compose_run
from app.data.detect_format import detect_formats
from app.data.prepare import Data, prepare, rows_to_score, stop_if_wrong
from app.errors import DataError
from tests.data.small import chat, config, tokenizer, write_jsonl

Row = dict[str, Any]
TABLE = "CREATE TABLE head (age INTEGER)"
EARLIER = [["Hi", "Hello there"]]
# format (`auto` finds the same), row, text of the sample once the first command is followed
STOPS: list[tuple[str, Row, str]] = [
    ("question_answer", {"question": "How many?", "context": TABLE, "answer": "One"}, f"How many?\n\n{TABLE}"),
    ("question_answer", {"question": "q", "answer": "a", "input": "one", "system": "Be brief."}, "q\n\none"),
    ("question_answer", {"question": "And you?", "answer": "Fine.", "history": EARLIER}, "Hello there"),
    ("question_answer", {"question": "q", "answer": "a", "history": "He said hello."}, "He said hello."),
    ("prompt_completion", {"prompt": "q", "completion": "a", "passage": "It rains."}, "q\n\nIt rains."),
    ("instruction", {"instruction": "q", "output": "a", "document": "It rains."}, "q\n\nIt rains."),
    ("messages", {"messages": chat("q", "a"), "context": "It rains."}, "system\nIt rains."),
    ("chat_completion", {"prompt": chat("q"), "completion": chat("q", "a")[1:], "schema": TABLE}, TABLE),
    (
        "question_answer",
        {"question": "q", "answer": "a", "context": "It rains.", "passage": "It snows."},
        "rains.\n\nIt snows.",
    ),
]
TAKEN: list[tuple[str, Row]] = [
    ("question_answer", {"question": "Say: it rains.", "answer": "a", "context": "it  rains."}),  # in the sample
    ("question_answer", {"question": "q", "answer": "a", "context": "doc-17", "table": "users", "schema": None}),
    ("question_answer", {"question": "q", "answer": "a", "explanation": "Because it rains."}),
    ("text", {"text": "It rains.", "document": "A book of rain"}),
    ("prompt_completion", {"prompt": "q", "completion": "a", "label": 3}),
    ("text", {"text": "It rains.", "label": 0}),
    ("labelled_text", {"text": "It rains.", "label": 0, "context": "It is late."}),
]
JUDGED: list[tuple[str, Row]] = [
    ("prompt_completion", {"prompt": "q", "completion": "a", "label": 0}),
    ("prompt_completion", {"prompt": "q", "completion": "a", "label": "1"}),
    ("messages", {"messages": chat("q", "a"), "kto_tag": 1.0}),
]


def data(folder: Path, rows: list[Row], fmt: str, **changes: Any) -> Data:
    found, notes = detect_formats(config(write_jsonl(folder / "a.jsonl", rows), fmt, **changes))
    return prepare(found, tokenizer(), str(folder / "cache"), notes)


def stopped(folder: Path, rows: list[Row], fmt: str) -> str:
    with pytest.raises(DataError) as error:
        data(folder, rows, fmt)
    [problem] = error.value.problems
    return problem


def follow(command: str, folder: Path) -> str:
    """The text of the first sample that a command of a message checks."""
    words = shlex.split(command)
    assert words[:4] == ["python", "-m", "app.check", "data"]
    found, _ = detect_formats(compose_run(words[4:]).dataset)
    rows = prepare(found, tokenizer(), str(folder / "cache"))
    return str(tokenizer().decode(rows.train.ids(0)))


@pytest.mark.parametrize(("fmt", "row", "text"), STOPS)
def test_unread_input_stops_with_commands_that_work(tmp_path: Path, fmt: str, row: Row, text: str) -> None:
    for given in (fmt, "auto"):
        problem = stopped(tmp_path, [row] * 3, given)
        assert problem.startswith(f"dataset.path={tmp_path}/a.jsonl: not read, though the answers may need it: ")
        commands = re.findall(r"type: (.*)", problem)
        assert len(commands) == 2
        assert text in follow(commands[0], tmp_path)
        assert text not in follow(commands[-1], tmp_path)


@pytest.mark.parametrize(("fmt", "row"), TAKEN)
def test_unread_column_that_answers_do_not_need_is_told(tmp_path: Path, fmt: str, row: Row) -> None:
    for given in (fmt, "auto"):
        report = data(tmp_path, [row] * 3, given).report.train
        assert report.samples == 3
        assert list(row)[-1] in report.unread_columns or None in row.values()


def test_unread_input_of_few_rows_or_left_out_on_purpose_is_told(tmp_path: Path) -> None:
    row = {"question": "q", "answer": "a"}
    data(tmp_path, [row, row, {**row, "context": "It rains."}], "question_answer")
    full = [{**row, "system": "Be kind.", "input": "one two"}] * 2
    data(tmp_path, full, "question_answer", columns={"system": None}, leave_out=["input"])


@pytest.mark.parametrize(("fmt", "row"), JUDGED)
def test_answers_judged_by_numbers_stop(tmp_path: Path, fmt: str, row: Row) -> None:
    name = list(row)[-1]
    for given in (fmt, "auto"):
        problem = stopped(tmp_path, [row] * 3, given)
        assert f"column '{name}' is 0 or 1 in 3 of 3 rows, which judges the answers" in problem
        assert f"jq -c 'select((.{name} | tonumber) == 1) | del(.{name})' {tmp_path}/a.jsonl > a-fixed.jsonl" in problem
        follow(problem.rpartition("type: ")[2], tmp_path)
    data(tmp_path, [row, {**row, name: 2}], fmt)  # classes


def test_unread_input_in_mix_names_its_section(tmp_path: Path) -> None:
    row = {"question": "q", "answer": "a", "context": "It rains."}
    mix = {"x": MixSource(path=str(write_jsonl(tmp_path / "x.jsonl", [row])), format="question_answer")}
    with pytest.raises(DataError, match=r"type: dataset\.mix\.x\.format=instruction dataset\.mix\.x\.columns\.instr"):
        prepare(replace(config(tmp_path), path=None, mix=mix), tokenizer(), str(tmp_path / "cache"))


def test_unread_input_is_found_whatever_columns_other_formats_have(tmp_path: Path) -> None:
    row = {"question": "q", "answer": "a", "input": "It rains."}
    with pytest.raises(DataError, match="not read, though the answers may need it: input"):
        data(tmp_path, [row], "question_answer", columns={"input": None})


def test_unread_input_of_a_finished_run_stops_no_scoring(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [STOPS[0][1]])
    asked = config(path, "question_answer", eval_path=path)
    for trains in (True, False):
        judge = partial(stop_if_wrong, trains=trains)
        with pytest.raises(DataError, match="not read") if trains else nullcontext():
            rows_to_score(asked, tokenizer(), str(tmp_path / "cache"), judge=judge)
