"""docs/techniques.md: the words of its commands are read as the program reads them; those of ladders, with them."""

import re
from pathlib import Path

import pytest

from app.config.conf_files import choices_by_group
from scripts import make_techniques
from tests.docs.blocks import Command
from tests.docs.test_commands import with_runs, wrong_words

TYPED = {make_techniques.typed(row) for row in make_techniques.ROWS}


def test_the_words_of_every_technique_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(with_runs(tmp_path))
    ladders = {text for text in TYPED if "sweep=" in text}
    assert {re.findall(r"sweep=(\w+)", text)[0] for text in ladders} <= {*choices_by_group()["sweep"]}
    wrong = {text: wrong_words(Command("", text)) for text in TYPED - ladders}
    assert {text: why for text, why in wrong.items() if why} == {}
