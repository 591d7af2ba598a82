"""`finetune train` that is killed, or gets an error of the disk, at the n-th time that it changes a file of its run.

    python -m tests.full.command.file_events EVENT [arguments of finetune train]

EVENT: `count FILE` writes how many there are to FILE; `kill N`; or the name of an errno and N.
"""

import errno
import os
import signal
import sys
from pathlib import Path
from typing import Any

from app import train

CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree", "os.chmod"}


class Events:
    """An audit hook: calls of the system that change a file below the working folder."""

    def __init__(self, what: str, at: int) -> None:
        self.what, self.at, self.count = what, at, 0
        self.folder = f"{Path.cwd()}/"

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not (event in CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR))):
            return
        path = arguments[0]
        if isinstance(path, int | None) or not os.path.abspath(os.fsdecode(path)).startswith(self.folder):  # noqa: PTH100
            return
        self.count += 1
        if self.count != self.at:
            return
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        number = getattr(errno, self.what)
        raise OSError(number, os.strerror(number), path)


def main() -> None:
    what, at, *sys.argv[1:] = sys.argv[1:]
    events = Events(what, int(at) if at.isdecimal() else 0)
    sys.addaudithook(events)
    try:
        train.main()
    finally:
        events.at = 0
        if what == "count":
            Path(at).write_text(str(events.count))
