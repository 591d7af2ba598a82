"""A pseudo terminal for a Python process, and the screen that its output leaves."""

import fcntl
import os
import pty
import re
import struct
import termios

from tests.harness.child import start

_CONTROL = re.compile(r"\x1b\[\??([0-9;]*)([A-Za-z])|(\r)|(\n)")


def on_a_terminal(code: str, columns: int, *arguments: str, **environment: str) -> tuple[int, bytes]:
    """Exit code, and all bytes written to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    cleared = {"TERM": "xterm-256color", "COLUMNS": str(columns), "NO_COLOR": "", **environment}
    process = start(code, *arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=cleared)
    os.close(theirs)
    seen = b""
    while chunk := _read(ours):
        seen += chunk
    os.close(ours)
    return process.wait(60), seen


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # how Linux says that the other end is closed
        return b""


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
