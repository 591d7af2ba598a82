"""Pictures of README.md: what they were made of is as it was, and the program still says what they show."""

import re
import shlex
from html import unescape

import pytest

from app import __version__
from app.config.load import compose_run
from app.errors import AppError
from app.program import STARTED_AS
from scripts import make_pictures
from tests.conftest import REPO

REMEDY = "run python -m scripts.make_pictures"


def test_pictures_are_of_these_pages_and_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_pictures.MADE_OF.read_text().strip() == make_pictures.made_of(), REMEDY
    for name, badge in make_pictures.badges().items():
        assert (make_pictures.PICTURES / name).read_text() == badge, REMEDY
    picture, texts = (make_pictures.PICTURES / "terminal.svg").read_text(), make_pictures.SHOWN.read_text()
    shown = unescape(re.sub(r"<[^>]*>", "", picture)).replace("\xa0", " ")
    assert [line for line in texts.splitlines() if line not in shown] == [], REMEDY
    assert "url(http" not in picture
    assert "@font-face" not in picture
    monkeypatch.setenv(STARTED_AS, "finetune")
    command, _, printed = texts.partition("\n\n")[0].partition("\n")
    with pytest.raises(AppError) as problem:
        compose_run(shlex.split(command)[3:])
    assert problem.value.report() == printed, REMEDY


def test_version_has_its_section() -> None:
    assert f"\n## [{__version__}] - " in (REPO / "CHANGELOG.md").read_text()
