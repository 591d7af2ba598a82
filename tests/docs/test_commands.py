"""The words of every command that README and docs show are read as the program reads them; the full tier types them."""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.assets import PREFIX
from app.config.commands import check_config, generate_config, report_config
from app.config.finished_run import evaluate_config, export_config, reproduce_config
from app.config.groups import choices_by_group
from app.config.load import compose_run
from app.config.overrides import is_sweep, split_arguments
from app.config.schema import RunConfig
from app.errors import AppError
from app.sweeps.sweep import plan_sweep, read_ladder
from scripts import make_techniques
from tests.conftest import REPO
from tests.docs.blocks import Command, commands_of, documents

TRAINS = re.compile(r"(.*/)?scripts/train|scripts/cluster/\w+\.sh|app\.train|app-finetune")
OTHERS: dict[str, Callable[[Sequence[str]], Any]] = {
    "app.check": check_config,
    "app.generate": generate_config,
    "app.report": report_config,
    "app.evaluate": lambda words: evaluate_config(words, lambda _: {}),
    "app.export": lambda words: export_config(words, lambda _: {}),
    "app.reproduce": lambda words: reproduce_config(words, lambda _: {}),
}
RUNS = ("first", "mine", "other", "labels")  # that documents speak of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("docs")
    settings = yaml.safe_dump(asdict(compose_run([])))
    for name in RUNS:
        (place / "runs" / name / "final").mkdir(parents=True)
        (place / "runs" / name / "final" / "adapter_config.json").touch()
        (place / "runs" / name / "run.yaml").write_text(settings)
    (place / "chat.jsonl").touch()  # a file that is there is no misspelt choice
    (place / "runs" / "rates").mkdir()
    (place / "runs" / "rates" / "sweep.json").write_text("{}")
    return place


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(REPO)))
def test_the_words_of_every_command_are_right(document: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    wrong = {f"{each.place}: `{each.text}`": wrong_words(each) for each in commands_of(document)}
    assert {place: why for place, why in wrong.items() if why} == {}


def test_the_words_of_every_technique_are_right(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a ladder's rungs are tested with it."""
    monkeypatch.chdir(folder)
    typed = {make_techniques.typed(row) for row in make_techniques.ROWS}
    ladders = {text for text in typed if "sweep=" in text}
    assert {re.findall(r"sweep=(\w+)", text)[0] for text in ladders} <= {*choices_by_group()["sweep"]}
    wrong = {text: wrong_words(Command("", text)) for text in typed - ladders}
    assert {text: why for text, why in wrong.items() if why} == {}


def wrong_words(command: Command) -> str:
    """Why they would be refused, unless the document shows that; or why a command that is marked can be typed."""
    try:
        runs = [run for part in command.text.split("&&") for run in runs_of(part)]
    except AppError as problem:
        report = problem.report()
        return "" if command.printed.strip() == report.strip() else report
    if command.printed.startswith("error: ") and "app.check memory" not in command.text:
        return "nothing is wrong with it, and the document shows an error"
    if command.needs == "network" and runs and not any(needs_network(run) for run in runs):
        return "it is marked, but its model and its data are here"
    return ""


def needs_network(run: RunConfig) -> bool:
    named = [run.model.path] if run.model.weights == "pretrained" else []
    return any("/" in name and not name.startswith((PREFIX, "/", ".")) for name in [*named, run.dataset.path or ""])


def runs_of(text: str) -> list[RunConfig]:
    """The runs that a command would start, each as it would be checked."""
    words = [word for word in shlex.split(text, comments=True) if word != "..."]
    for at, word in enumerate(words):
        if word == "app.check" and any(each.startswith("sweep=") for each in words):
            own = [each for each in words if each.startswith(("hardware", "exact="))]
            ladder = read_ladder([each for each in words[at + 2 :] if each not in own])
            return [check_config(["memory", *rung.overrides, *own]).run for rung in ladder.points if not rung.refused]
        if word in OTHERS:
            config = OTHERS[word](words[at + 1 :])
            return [config.run] if word == "app.check" else []
    starts = [n for n, word in enumerate(words) if TRAINS.fullmatch(word)]
    if not starts or words[:2] == ["docker", "build"]:
        return []
    settings = words[starts[-1] + 1 :]
    if not is_sweep(settings):
        return [compose_run(split_arguments(settings)[0])]
    return list(plan_sweep(settings, lambda _run: None).runs)
