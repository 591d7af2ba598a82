"""Every command that README and docs show is typed, in the order of its document, in a folder of its own.

It must end as the document says. What takes long is cut short after the words were read (`quickly`). Commands that
need a network, a GPU or the like are marked in the document (tests/docs/blocks.py) and not typed.
"""

from pathlib import Path

import pytest

from tests.conftest import REPO
from tests.docs.blocks import Command, commands_of, documents
from tests.full.docs.conftest import Shell

NOT_TYPED = {
    "scripts/test": "this test is a part of it",
    "python -m scripts.make_assets": "tests/assets types it, without the half hour of the weights and their gate",
}
TYPED_ELSEWHERE = {
    "compile=blocks": "tests/full/command/test_compile.py",  # a minute of torch's compiler
    "sweep.size=small": "tests/full/command/test_sweep.py and tests/command/test_check.py",  # minutes of ladders
}
ADVICE = (
    "Mend the command, or the document; what the test lacks is a stand-in (tests/full/docs/stand_ins.py) or, where no "
    "test can have it, a mark in front of the block: <!-- needs network -->, see tests/docs/blocks.py"
)


def is_typed(command: Command) -> bool:
    if command.needs is not None or any(command.text.startswith(name) for name in NOT_TYPED):
        return False
    return not any(word in command.text for word in TYPED_ELSEWHERE)


def typed_commands() -> dict[Path, list[Command]]:
    """Commands of each document; a plan of memory that several documents show is typed once."""
    planned: set[frozenset[str]] = set()
    typed: dict[Path, list[Command]] = {}
    for document in documents():
        for command in filter(is_typed, commands_of(document)):
            words = frozenset(command.text.split())
            if "check" not in words or words not in planned:
                typed.setdefault(document, []).append(command)
            planned |= {words}
    return typed


TYPED = typed_commands()


@pytest.mark.parametrize("document", TYPED, ids=lambda path: str(path.relative_to(REPO)))
def test_documented_commands_end_as_the_document_says(document: Path, shell: Shell) -> None:
    for command in TYPED[document]:
        ended = shell.type(command.text)
        said = f"{command.place}: `{command.text}` ended with {ended.returncode}\n{ended.stdout}{ended.stderr}"
        said += f"\n{ADVICE}"
        assert ended.returncode == command.code, said
        assert "Traceback" not in ended.stderr, said
        if command.printed.startswith("error: "):
            assert ended.stderr.strip() == command.printed.strip(), command.place


def test_shell_runs_what_is_typed(shell: Shell) -> None:
    """Through bash and the scripts: a wrong word, a failing command and a command nobody has are noticed."""
    wrong = shell.type("scripts/train optimizer.lrr=1")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "error: Unknown setting optimizer.lrr. Did you mean optimizer.lr?" in wrong.stderr
    assert shell.type("finetune generate run=runs/none prompt=x").returncode == 2
    assert shell.type("finetune trian").returncode == 2
    assert shell.type("python -m app.trian").returncode == 1
    assert shell.type("python other.py").returncode == 99
