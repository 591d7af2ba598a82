"""Every command that README and docs show is typed, in the order of its document, in a folder of its own.

It must end as the document says. What takes long is cut short after the words were read (`quickly`). Commands that
need a network, a GPU or the like are marked in the document (`blocks`); of those the words are checked.
"""

import re
import shlex
from pathlib import Path

import pytest

from app.assets import PREFIX
from app.config.commands import generate_config
from app.config.load import compose_run
from app.config.overrides import is_sweep
from app.config.schema import RunConfig
from app.errors import AppError
from app.sweep.command import planned
from tests.conftest import REPO
from tests.docs.blocks import Command, commands_of, documents
from tests.docs.conftest import Shell

NOT_TYPED = {
    "scripts/test": "this test is a part of it",
    "python -m scripts.make_assets": "tests/assets types it, without the half hour of the weights and their gate",
}
TRAINS = re.compile(r"(.*/)?scripts/train|scripts/cluster/\w+\.sh|app\.train|app-finetune")
ADVICE = (
    "Mend the command, or the document; what the test lacks is a stand-in (tests/docs/stand_ins.py) or, where no test "
    "can have it, a mark in front of the block: <!-- needs network -->, see tests/docs/blocks.py"
)
every_document = pytest.mark.parametrize(
    "document", documents(), ids=lambda path: str(path.relative_to(REPO))
)


def is_typed(command: Command) -> bool:
    return command.needs is None and not any(command.text.startswith(name) for name in NOT_TYPED)


@every_document
def test_the_commands_do_what_the_document_says(document: Path, request: pytest.FixtureRequest) -> None:
    commands = [command for command in commands_of(document) if is_typed(command)]
    if not commands:
        return
    shell: Shell = request.getfixturevalue("shell")
    for command in commands:
        ended = shell.type(command.text)
        said = (
            f"{command.place}: `{command.text}` ended with {ended.returncode}\n{ended.stdout}{ended.stderr}"
        )
        said += f"\n{ADVICE}"
        assert ended.returncode == command.code, said
        assert "Traceback" not in ended.stderr, said
        if command.printed.startswith("error: "):
            assert ended.stderr.strip() == command.printed.strip(), command.place


@every_document
def test_the_words_of_commands_that_cannot_be_typed_here_are_right(document: Path) -> None:
    marked = [command for command in commands_of(document) if command.needs is not None]
    assert {f"{each.place}: `{each.text}`": wrong for each in marked if (wrong := wrong_words(each))} == {}


def wrong_words(command: Command) -> str:
    """Why they would be refused; or why a command that is marked could have been typed."""
    try:
        runs = [run for part in command.text.split("&&") for run in runs_of(part)]
    except AppError as problem:
        return problem.report()
    if command.needs == "network" and runs and not any(needs_network(run) for run in runs):
        return "it is marked, but its model and its data are here"
    return ""


def needs_network(run: RunConfig) -> bool:
    named = [run.model.path] if run.model.weights == "pretrained" else []
    return any(
        "/" in name and not name.startswith((PREFIX, "/", ".")) for name in [*named, run.dataset.path or ""]
    )


def runs_of(text: str) -> list[RunConfig]:
    """The runs that a command would start, each as it would be checked."""
    words = [word for word in shlex.split(text, comments=True) if word != "..."]
    if "app.generate" in words:
        generate_config(words[words.index("app.generate") + 1 :])
        return []
    starts = [n for n, word in enumerate(words) if TRAINS.fullmatch(word)]
    if not starts or words[:2] == ["docker", "build"]:
        return []
    settings = words[starts[-1] + 1 :]
    if not is_sweep(settings):
        return [compose_run(settings)]
    return list(planned(settings, lambda _run: None).runs)


def test_what_is_not_typed_is_there() -> None:
    for name in NOT_TYPED:
        path = REPO / name.removeprefix("python -m ").replace(".", "/")
        assert path.is_file() or (path / "__main__.py").is_file()
