"""A run on a terminal: what is shown meanwhile, and what is left on the screen."""

import os
import re
from pathlib import Path

import pytest

from tests.harness.runs import SMALL, FinishedRuns, Zygote
from tests.harness.terminal import screen, terminal, variables

STATUSES = [
    *("Importing torch ...", "Reading rows ...", "Planning memory ...", "Loading weights ...", "Checking the model ...")
]


def shown_to(columns: int, zygote: Zygote, folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a command on a terminal."""
    command = {"do": "start", "module": "app.train", "arguments": arguments, "cwd": str(folder)}
    with terminal(columns) as (end, seen):
        name = os.ttyname(end)
        pid = zygote.ask({**command, "env": variables(columns), "stdout": name, "stderr": name})["pid"]
        code: int = zygote.ask({"do": "wait", "pid": pid})["code"]
    return code, b"".join(seen).decode()


@pytest.mark.parametrize("columns", [80, 120])
def test_train_on_a_terminal(columns: int, zygote: Zygote, tmp_path: Path, finished: FinishedRuns) -> None:
    words = (*SMALL, "training.max_steps=6", "eval.every=2", f"output_dir={tmp_path / 'run'}")
    code, seen = shown_to(columns, zygote, tmp_path, *words)
    assert code == 0, seen
    places = [seen.index(status) for status in STATUSES]
    assert places == sorted(places)
    assert re.search(r"6/6 \S*━", seen)
    left = screen(seen)
    assert not any("━" in line or line in STATUSES or line.endswith(" left") for line in left)
    assert left[-2].startswith("report  ")
    assert any(line.startswith("  before ") for line in left) == (columns == 80), "two lines per row of answers"
    log = (tmp_path / "run" / "log.txt").read_text()
    finished()
    assert not any(status in text for status in STATUSES for text in (log, finished.said["lora"]))


def test_train_error_on_a_terminal_removes_the_status(zygote: Zygote, tmp_path: Path) -> None:
    code, seen = shown_to(80, zygote, tmp_path, "attention=flash", "output_dir=run")
    assert code == 2
    assert "Reading rows ..." in seen
    assert [line.partition(" ")[0] for line in screen(seen)] == ["output", "error:", ""]
