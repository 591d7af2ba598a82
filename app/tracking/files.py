"""Writing so that a crash leaves the old or the new content, and a full disk gives a message."""

import errno
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from app.errors import EnvironmentProblem

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What goes wrong with files in here is the user's to mend."""
    try:
        yield
    except OSError as fault:
        advice = (
            "free disk space and start again with resume=auto, or choose an output_dir on another disk"
            if fault.errno in _NO_SPACE
            else "choose an output_dir that can be written to"
        )
        raise EnvironmentProblem(f"output_dir: cannot write {path} ({fault.strerror}); {advice}") from fault


def is_partial(name: str) -> bool:
    """Whether it is what a killed `write_text` leaves behind."""
    return name.startswith(".") and name.endswith(".partial")


def write_text(path: Path, text: str) -> None:
    """All of it or nothing, and on the disk when this returns."""
    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        try:
            with partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            flush(path.parent)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise


def write_json(path: Path, value: Any) -> None:
    """Readable by people too."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def append_text(path: Path, text: str) -> None:
    """It is with the operating system when this returns: killing the process loses nothing."""
    # Lone surrogates from a user's data become the JSON escapes that they came from.
    left = text.encode("utf-8", "backslashreplace")
    with writing(path), io.FileIO(path, "a") as file:
        while left:
            left = left[file.write(left) :]


def sync(path: Path) -> None:
    """What was appended is on the disk: a power cut loses nothing either."""
    if path.exists():
        with writing(path), path.open("rb") as file:
            os.fsync(file.fileno())


def flush(path: Path) -> None:
    """A file, or the names in a folder, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
