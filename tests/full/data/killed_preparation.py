"""Preparations that are killed at a named moment, each in a process of its own (a fork: imports cost seconds).

python -m tests.full.data.killed_preparation ROWS CACHE      one JSON line per moment
"""

import json
import os
import pathlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.data import token_dataset
from app.data.prepare import prepare
from app.data.token_dataset import RowWriter
from tests.data.small import config, tokenizer

Patch = Callable[[], None]


def main() -> None:
    """Kill, look, prepare again, look."""
    rows, cache = sys.argv[1:]
    token_dataset.BATCH_ROWS = 512
    clean = _in_a_fork(lambda: _prepared(rows, f"{cache}-clean"))
    for moment, patch in MOMENTS.items():
        here = f"{cache}-{moment}"
        status = _in_a_fork(lambda patch=patch, here=here: (patch(), _prepared(rows, here))[1])  # type: ignore[misc]
        left = sorted(entry.name for entry in (Path(here) / "tokens").iterdir())
        again = _in_a_fork(lambda here=here: _prepared(rows, here))  # type: ignore[misc]
        after = sorted(entry.name for entry in (Path(here) / "tokens").iterdir())
        print(json.dumps([moment, status, left, again == clean, after]))


def _prepared(rows: str, cache: str) -> str:
    return prepare(config(rows), tokenizer(), cache).train.fingerprint


def _in_a_fork(work: Callable[[], str]) -> str:
    """What `work` returns, or the signal that ended it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.write(writing, work().encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return said if code == 0 else f"ended with {code}"


def _die(*_of: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _at_row(number: int) -> Patch:
    def patch() -> None:
        add, added = RowWriter.add, iter(range(number))

        def dying(self: RowWriter, *of: Any, **named: Any) -> None:
            next(added, None) is None and _die()
            add(self, *of, **named)

        RowWriter.add = dying  # type: ignore[method-assign]

    return patch


def _at_sync(number: int) -> Patch:
    def patch() -> None:
        sync, made = os.fsync, iter(range(number))

        def dying(handle: int) -> None:
            next(made, None) is None and _die()
            sync(handle)

        vars(os)["fsync"] = dying

    return patch


def _at_rename() -> None:
    pathlib.Path.replace = _die  # type: ignore[method-assign, assignment]


MOMENTS: dict[str, Patch] = {
    "first row": _at_row(0),
    "row 700": _at_row(700),
    "written but not synced": _at_sync(0),
    "whole but not in place": _at_rename,
    "in place": _at_sync(1),
}

if __name__ == "__main__":
    main()
