"""The notebook of docs/: its commands compose, and its outputs are stored. The full tier executes it."""

import json
import re
from pathlib import Path

import pytest

from tests.conftest import REPO
from tests.docs.blocks import Command
from tests.docs.test_commands import folder, wrong_words  # noqa: F401  a fixture


def test_commands_of_the_notebook_compose(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.chdir(folder)
    cells = json.loads((REPO / "docs" / "first_run.ipynb").read_text())["cells"]
    printed = json.dumps([cell.get("outputs") for cell in cells])
    assert all(text in printed for text in ("Did you mean optimizer.lr?", "done    60 steps", "'status': 'finished'"))
    typed = re.findall(r"^(?:# )?!(.*)$", "\n".join("".join(cell["source"]) for cell in cells), re.MULTILINE)
    wrong = {text: why for text in typed if "--" not in text and (why := wrong_words(Command("", text)))}
    assert len(typed) == 7
    assert [text for text in wrong if "lrr" not in text] == []
    assert "precision=fp16 attention=sdpa" in typed[0]
