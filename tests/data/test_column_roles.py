"""Small shapes of training data: what becomes of each, and whether the commands of a stop work as typed."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from app.config.rules import problems_of
from app.config.schema import RunConfig
from app.data.columns import ABSENT, value
from app.errors import AppError
from app.training.data_advice import advice
from app.training.data_check import check_data
from tests.data.shapes import ANSWERED, ASKS, HH, PAIR, QA, SHAPES, Shape, both
from tests.data.small import write_jsonl
from tests.harness.composed import composed

# Overrides that need no new composition, which takes a fifth of a second.
IN_PLACE = ("dataset.columns.", "dataset.leave_out=", "dataset.path=")
CHECK = ["python", "-m", "app.check", "data"]


@dataclass(frozen=True)
class Verdict:
    """The stops of a check, its first sample with trained text in double brackets, and its report."""

    stops: list[str]
    sample: str = ""
    lines: tuple[str, ...] = ()


def check(words: list[str]) -> Verdict:
    """Check data in process, as `python -m app.check data` does with these words."""
    run = _composed(words)
    run.cache_dir = "cache"
    try:
        found = check_data(run, 1, lambda line: None)
    except AppError as error:
        return Verdict(list(error.problems))
    pieces = [each for row in found.preview["rows"][:1] for each in row["pieces"]]
    sample = "".join(f"[[{each['text']}]]" if each["trained"] else each["text"] for each in pieces)
    return Verdict(found.stops, sample, (*found.data.report.lines(), *(set_ for set_, _ in advice(found))))


def _composed(words: list[str]) -> RunConfig:
    late = [word for word in words if word.startswith(IN_PLACE)]
    run = composed("dataset.max_length=120", "dataset.path=rows.jsonl", *(word for word in words if word not in late))
    for override in OverridesParser.create().parse_overrides(late):
        name = str(override.key_or_group).removeprefix("dataset.")
        holder = run.dataset.columns if name.startswith("columns.") else run.dataset
        assert hasattr(holder, name.removeprefix("columns."))
        setattr(holder, name.removeprefix("columns."), override.value())
    assert not problems_of(run)
    return run


def follow(command: str, shape: Shape) -> Verdict:
    """Type a command of a message in the folder of the rows; rows that it makes are checked as any others."""
    made, _, checked = command.rpartition(" && ")
    if command.startswith("jq ") and not made:
        made, checked = command, shlex.join([*CHECK, "dataset=auto", f"dataset.path={shlex.split(command)[-1]}"])
    if made:
        folder = str(Path(sys.executable).parent)
        path = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        subprocess.run(["bash", "-c", made], check=True, env=path)
    words = shlex.split(checked)
    assert words[:4] == CHECK
    return check([*words[4:], *shape.model])


def commands_of(stop: str) -> list[str]:
    return re.findall(r"(?:type|alone|of each answer): (.*)", stop)


@pytest.mark.parametrize("shape", SHAPES, ids=[shape.name for shape in SHAPES])
def test_shape_trained_or_stopped_with_commands_that_work(
    shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [shape.rows] * 3 if isinstance(shape.rows, dict) else shape.rows
    lines = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    Path(shape.file).write_text(json.dumps(rows) if shape.file.endswith(".json") else lines, "utf-8")
    found = check([*shape.words, f"dataset.path={shape.file}", *shape.model])
    if not shape.stop:
        assert (found.stops, found.sample) == ([], shape.trained)
        return
    assert found.stops
    assert shape.stop in found.stops[0]
    typed = commands_of(found.stops[0])
    assert len(typed) == len(shape.commands)
    for command, sample in zip(typed, shape.commands, strict=True):
        if shutil.which("jq") is None and "jq -" in command:
            continue
        followed = follow(command, shape)
        if sample:
            assert (followed.stops, followed.sample) == ([], sample)
        else:  # it stops at another column
            assert followed.stops
            assert shape.stop not in followed.stops[0]


def test_preference_text_on_model_with_template_notes_the_other_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [shape] = [shape for shape in SHAPES if shape.name == "dpo-text-prompt"]
    write_jsonl(tmp_path / "rows.jsonl", [shape.rows])
    [note] = [line for line in check([*shape.words]).lines if "chat template" in line]
    begin, command = note.split(" type: ")
    assert begin.startswith("dataset.format=preference_text writes no chat template, although the model has one.")
    followed = follow(command, shape)
    assert followed.sample == both(ASKS)
    assert not any("chat template" in line for line in followed.lines)
    write_jsonl(tmp_path / "rows.jsonl", [{"chosen": f"{HH} Hello", "rejected": f"{HH} No"}])
    assert not any("chat template" in line for line in check([*shape.words]).lines)


def test_preference_without_prompt_names_the_column_that_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", [{"question": ASKS, **PAIR}])
    [problem] = check(["recipe=dpo", "dataset=preference"]).stops
    assert "; if column 'question' is the prompt, set dataset.columns.prompt=question" in problem
    words = ["recipe=dpo", "dataset=preference", "dataset.columns.prompt=question"]
    assert check(words) == check(["recipe=dpo", "dataset=preference", "dataset.columns.prompt=question+none"])


def test_reasoning_unread_on_purpose_does_not_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", [{**QA, "rationale": "We add one."}])
    for words in (["dataset.columns.reasoning=null"], ["dataset.thinking=drop"]):
        found = check(["dataset=auto", *words])
        assert (found.stops, found.sample) == ([], ANSWERED)


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"question": "q", "context": "c"}, "q\n\nc"),
        ({"question": "q", "context": None}, "q"),
        ({"question": "q"}, "q"),
        ({"question": None, "context": "c"}, None),
        ({"question": "q", "context": 3}, 3),
        ({"question+context": "x", "question": "q"}, "x"),
    ],
)
def test_joined_columns_need_the_one_that_asks(row: dict[str, Any], found: object) -> None:
    assert value(row, "question+context") == found
    assert value(row, "none+nothing") is ABSENT
