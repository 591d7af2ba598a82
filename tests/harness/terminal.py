"""A pseudo terminal for a Python process, and the screen that its output leaves."""

import fcntl
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.harness.child import start

_CONTROL = re.compile(r"\x1b\[\??([0-9;]*)([A-Za-z])|(\r)|(\n)")


@contextmanager
def terminal(columns: int) -> Iterator[tuple[int, list[bytes]]]:
    """The end of a process, open until the block ends, and all that was written by then."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    seen = list[bytes]()
    reader = threading.Thread(target=lambda: seen.extend(iter(lambda: _read(ours), b"")))
    reader.start()
    try:
        yield theirs, seen
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # how Linux says that the other end is closed
        return b""


def variables(columns: int) -> dict[str, str]:
    return {"TERM": "xterm-256color", "COLUMNS": str(columns), "NO_COLOR": ""}


def on_a_terminal(code: str, columns: int, **environment: str) -> tuple[int, str]:
    """Exit code, and all that Python code writes to a terminal of so many columns."""
    with terminal(columns) as (end, seen):
        process = start(code, stdin=end, stdout=end, stderr=end, env={**variables(columns), **environment})
        returncode = process.wait(60)
    return returncode, b"".join(seen).decode()


def screen(text: str) -> list[str]:
    """Lines left on an endless screen by the controls that rich writes: return, cursor up, erase line, colors."""
    lines, row, column, at = [""], 0, 0, 0
    for control in [*_CONTROL.finditer(text), None]:
        written = text[at : control.start() if control else None]
        lines[row] = lines[row][:column].ljust(column) + written + lines[row][column + len(written) :]
        column += len(written)
        if control is None:
            break
        at, letter = control.end(), control[2]
        if control[3]:
            column = 0
        elif control[4]:
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        elif letter == "A":
            row -= int(control[1] or 1)
        elif letter == "K":
            assert control[1] == "2"
            lines[row] = ""
        else:
            assert letter in "mhl", control[0]
    return [line.rstrip() for line in lines]
