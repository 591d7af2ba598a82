"""Which console suits where the program writes to."""

import os
import sys
from typing import TextIO

from app.record.console import Console, PlainConsole, SafeStream
from app.record.hearing import hear


def open_console(stream: TextIO | None = None) -> Console:
    """The one that suits the stream (standard output if none is given); what all rooms have to say is said there."""
    console = _suitable(SafeStream(stream or sys.stdout))
    hear(console)
    return console


def _suitable(safe: SafeStream) -> Console:
    if safe.isatty() and can_move():
        from app.record.live import LiveConsole

        return LiveConsole(safe)
    return PlainConsole(safe)


def can_move() -> bool:
    """Whether a terminal obeys when it is told to go back in a line: TERM says what it is."""
    return os.environ.get("TERM", "") not in {"", "dumb", "unknown"}
