"""Rows as people bring them: what is trained of each, or the stop and what its commands make. Cases: row_corpus.jsonl.

A case has `rows` (one stands three times in the file), the `words` typed, and either the sample that is `trained`, with
trained text in double brackets, or words of the `stop` and the samples that its `commands` make, the one that reads the
column first; empty where a command stops at another column. `unread` is a column that the report names as not read,
`taken` the settings that dataset.format=auto found.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from app.config.rules import problems_of
from app.config.schema import MixSource, RunConfig
from app.data.columns import ABSENT, value
from app.data.prepare import prepare, rows_to_score, stop_if_wrong
from app.errors import AppError, DataError
from app.training.data_check import advice, check_data
from tests.data.small import config, tokenizer, write_jsonl
from tests.harness.composed import composed

# Overrides that need no new composition, which takes a fifth of a second.
IN_PLACE = ("dataset.columns.", "dataset.leave_out=", "dataset.path=", "dataset.on_bad_row=")
TAKEN = "dataset.format=auto: detected dataset.format="
CHECK = ["finetune", "check", "data"]
QA = {"question": "What is one?", "answer": "The first."}
WITH_CONTEXT = {**QA, "context": "It rains today."}
PAIR = {"chosen": "It is two.", "rejected": "No idea."}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the corpus."""

    name: str
    rows: dict[str, Any] | list[Any] | str  # a text is the whole file
    words: tuple[str, ...] = ("dataset=auto",)
    model: tuple[str, ...] = ()
    file: str = "rows.jsonl"
    trained: str = ""
    stop: str = ""
    commands: tuple[str, ...] = ()
    unread: str = ""
    taken: str = ""

    def write(self) -> None:
        rows = [self.rows] * 3 if isinstance(self.rows, dict) else self.rows
        lines = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        Path(self.file).write_text(json.dumps(rows) if self.file.endswith(".json") else lines, "utf-8")


CORPUS = [Case(**json.loads(line)) for line in Path(__file__).with_name("row_corpus.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@dataclass(frozen=True)
class Verdict:
    """The stops of a check, its first sample with trained text in double brackets, and its report."""

    stops: list[str]
    sample: str = ""
    lines: tuple[str, ...] = ()


def check(words: list[str]) -> Verdict:
    """Check data in process, as `finetune check data` does with these words."""
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


def follow(command: str, case: Case) -> Verdict:
    """Type a command of a message in the folder of the rows; rows that it makes are checked as any others."""
    made, _, checked = command.rpartition(" && ")
    if command.startswith("jq ") and not made:
        made, checked = command, shlex.join([*CHECK, "dataset=auto", f"dataset.path={shlex.split(command)[-1]}"])
    if made:
        folder = str(Path(sys.executable).parent)
        path = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        subprocess.run(["bash", "-c", made], check=True, env=path)
    words = shlex.split(checked)
    assert words[:3] == CHECK
    return check([*words[3:], *case.model])


def commands_of(stop: str) -> list[str]:
    return re.findall(r"(?:type|to a conversation): (.*?)(?:, or train on both.*)?$", stop, re.MULTILINE)


@pytest.mark.parametrize("case", CORPUS, ids=[case.name for case in CORPUS])
def test_rows_trained_or_stopped_with_commands_that_work(case: Case) -> None:
    case.write()
    found = check([*case.words, f"dataset.path={case.file}", *case.model])
    if not case.stop:
        assert (found.stops, found.sample) == ([], case.trained)
        assert not case.unread or any("columns not read: " in line and case.unread in line for line in found.lines)
        assert not case.taken or any(line.startswith(f"{TAKEN}{case.taken}") for line in found.lines)
        return
    assert found.stops
    assert case.stop in found.stops[0]
    typed = commands_of(found.stops[0])
    assert len(typed) == len(case.commands)
    for command, sample in zip(typed, case.commands, strict=True):
        if shutil.which("jq") is None and "jq -" in command:
            continue
        followed = follow(command, case)
        if sample:
            assert (followed.stops, followed.sample) == ([], sample)
        else:  # it stops at another column
            assert followed.stops
            assert case.stop not in followed.stops[0]


# but messages, which may have any name
SETS = [case for case in CORPUS if ".columns." in case.taken and not case.taken.startswith("messages")]


@pytest.mark.parametrize("case", SETS, ids=[case.name for case in SETS])
def test_set_of_columns_with_another_name_refused(case: Case) -> None:
    assert isinstance(case.rows, dict)
    renamed = {f"{name}_" if f"={name}" in case.taken else name: found for name, found in case.rows.items()}
    replace(case, rows=renamed).write()
    assert "no format fits" in check([*case.words]).stops[0]


def test_preference_text_on_model_with_template_notes_the_other_command() -> None:
    [case] = [case for case in CORPUS if case.name == "dpo-text-prompt"]
    [of_chat] = [case for case in CORPUS if case.name == "dpo-prompt"]
    case.write()
    [note] = [line for line in check([*case.words]).lines if "chat template" in line]
    begin, command = note.split(" type: ")
    assert begin.startswith("dataset.format=preference_text does not use the chat template of the model.")
    followed = follow(command, case)
    assert followed.sample == of_chat.trained
    assert not any("chat template" in line for line in followed.lines)
    hh = "\n\nHuman: Hi\n\nAssistant:"
    replace(case, rows={"chosen": f"{hh} Hello", "rejected": f"{hh} No"}).write()
    assert not any("chat template" in line for line in check([*case.words]).lines)


def test_preference_without_prompt_names_the_column_that_asks() -> None:
    Case(name="", rows={"question": "What is after 1?", **PAIR}).write()
    [problem] = check(["recipe=dpo", "dataset=preference"]).stops
    assert "; if column 'question' is the prompt, set dataset.columns.prompt=question" in problem
    words = ["recipe=dpo", "dataset=preference", "dataset.columns.prompt=question"]
    assert check(words) == check(["recipe=dpo", "dataset=preference", "dataset.columns.prompt=question+none"])


def test_reasoning_unread_on_purpose_does_not_stop() -> None:
    Case(name="", rows={**QA, "rationale": "We add one."}).write()
    for words in (["dataset.columns.reasoning=null"], ["dataset.thinking=drop"]):
        found = check(["dataset=auto", *words])
        assert not found.stops
        assert found.sample == "<|user|>What is one?<|end|><|assistant|>[[The first.<|end|>]]"


def test_unread_input_in_mix_names_its_section(tmp_path: Path) -> None:
    mix = {"x": MixSource(path=str(write_jsonl(tmp_path / "x.jsonl", [WITH_CONTEXT])), format="question_answer")}
    with pytest.raises(DataError, match=r"type: dataset\.mix\.x\.format=instruction dataset\.mix\.x\.columns\.instr"):
        prepare(replace(config(tmp_path), path=None, mix=mix), tokenizer(), "cache")


def test_unread_input_of_a_finished_run_stops_no_scoring(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [WITH_CONTEXT])
    asked = config(path, "question_answer", eval_path=path)
    for trains in (True, False):
        judge = partial(stop_if_wrong, trains=trains)
        with pytest.raises(DataError, match="not read") if trains else nullcontext():
            rows_to_score(asked, tokenizer(), "cache", judge=judge)


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
