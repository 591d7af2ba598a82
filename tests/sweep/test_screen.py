"""One line that moves, on a terminal alone."""

import io
import os
import pty

import pytest
from rich.table import Table

from app.sweep.runner import Screen


def test_a_terminal_has_a_line_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        screen = Screen(stream)
        screen.say("trial 1/2")
        screen.show("  step 1/9 | loss 4.1234 | more")
        screen.show("  step 1/9 | loss 4.1234 | more")  # nothing new, nothing written
        screen.say("done \x1b[31mnot red")
        seen = ""
        while "not red\r\n" not in seen:
            seen += os.read(ours, 10_000).decode()
    os.close(ours)
    erase = "\r\x1b[2K"
    assert seen == f"trial 1/2\r\n{erase}  step 1/9 | loss 4{erase}done \ufffd[31mnot red\r\n"


def test_a_file_has_whole_lines_only() -> None:
    stream = io.StringIO()
    screen = Screen(stream)
    screen.show("  step 1/9")
    screen.say("done")
    table = Table("a", "b")
    table.add_row("x" * 150, "y")
    screen.table(table)
    text = stream.getvalue()
    assert text.startswith("done\n")
    assert "\x1b" not in text
    assert "x" * 150 in text
