"""Which console suits where the program writes to."""

import os
import sys
from typing import TextIO

from app.record.console import Console, PlainConsole, SafeStream


def open_console(stream: TextIO | None = None) -> Console:
    """The one that suits the stream (standard output if none is given)."""
    safe = SafeStream(stream or sys.stdout)
    if safe.isatty() and os.environ.get("TERM") != "dumb":
        from app.record.live import LiveConsole

        return LiveConsole(safe)
    return PlainConsole(safe)
