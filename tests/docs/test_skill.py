"""The instructions for coding assistants: their commands compose, and what they name is there."""

import json
import re
from pathlib import Path

import pytest

from app.program import COMMANDS
from tests.conftest import REPO
from tests.docs.blocks import Command, commands_in
from tests.docs.test_commands import folder, wrong_words  # noqa: F401  a fixture
from tests.harness.runs import FinishedRuns, metrics, result

SKILL = (REPO / "app" / "SKILL.md").read_text()


def rows_of(heading: str) -> list[list[str]]:
    part = SKILL.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [re.split(r" *\| *", line.strip("| ")) for line in part.splitlines() if line.startswith("| ")]


def test_commands_of_the_skill_compose(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    assert len(SKILL.splitlines()) < 80
    monkeypatch.chdir(folder)
    for name in ("pairs.jsonl", "questions.jsonl"):
        (folder / name).touch()
    (folder / "axolotl.yaml").write_text("base_model: asset:tiny\nadapter: lora\ndatasets: [{path: chat.jsonl}]\n")
    typed = [each.text for each in commands_in(SKILL, "SKILL.md")]
    typed += re.findall(r"`(finetune \w+ [^`]*)`", SKILL.partition("## In this order")[2])
    assert {word for text in typed for word in re.findall(r"finetune (\w+)", text)} >= COMMANDS.keys() - {
        "reproduce",
        "board",
        "completion",
    }
    assert {text: why for text in typed if (why := wrong_words(Command("", text)))} == {}


def test_files_keys_and_codes_of_the_skill_are_right(finished: FinishedRuns) -> None:
    run, told = finished("lora"), {cells[0]: cells[1] for cells in rows_of("What to read afterwards")}
    there = {name for name in (re.sub(r"[`]|RUN/", "", cell) for cell in told) if (run / name).exists()}
    assert there == {"result.json", "metrics.jsonl", "manifest.json", "samples.jsonl"}
    keys = re.sub(r"\(.*?\)", "", told["`RUN/result.json`"])
    assert set(re.findall(r"`(\w+)`", keys)) <= result(run).keys()
    logged = {key for line in metrics(run) for key in line}
    assert set(" ".join(re.findall(r"`([^`]+)`", told["`RUN/metrics.jsonl`"])).split()) <= logged
    assert "starts" in json.loads((run / "manifest.json").read_text())
    codes = re.findall(r"^\| (\d+) \|", (REPO / "docs" / "output.md").read_text(), re.MULTILINE)
    assert [cells[0] for cells in rows_of("Exit codes") if cells[0].isdecimal()] == codes
