"""Folders that are whole or absent: written aside, flushed to the disk, hashed, renamed."""

import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from app.errors import EnvironmentProblem
from app.tracking.files import flush

MANIFEST = "manifest.json"
_ASIDE = ".writing-"


def aside_of(target: Path) -> Path:
    """Where it is written."""
    return target.with_name(_ASIDE + target.name)


@contextmanager
def renamed_into_place(target: Path, seal: Callable[[Path], None]) -> Iterator[Path]:
    """A folder to write into that becomes `target` once `seal` put it on the disk, and vanishes on any fault."""
    aside = aside_of(target)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        yield aside
        seal(aside)
        if target.exists():
            shutil.rmtree(target)
        aside.rename(target)
        flush(target.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """The same for what a run saves, with the hashes that `damage` compares."""
    with told_where_the_disk_is_full(target), renamed_into_place(target, _seal) as aside:
        yield aside


@contextmanager
def told_where_the_disk_is_full(target: Path) -> Iterator[None]:
    """Around what is written for it."""
    try:
        yield
    except BaseException as fault:
        if is_disk_full(fault):
            raise EnvironmentProblem(
                f"the disk is full: {target} could not be written. What was saved before is intact. "
                "Free space, or set output_dir= to another disk, and continue with resume=auto."
            ) from fault
        raise


def damage(folder: Path) -> str | None:
    """What is wrong with a sealed folder, in words; None when every byte is as it was written."""
    try:
        hashes: dict[str, str] = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError):
        return f"{MANIFEST} cannot be read"
    for name, expected in hashes.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if _sha256(file) != expected:
            return f"{name} is not what was written"
    return None


def remove_leftovers(folder: Path) -> None:
    """What a killed process was writing."""
    for leftover in folder.glob(f"{_ASIDE}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def is_disk_full(fault: BaseException) -> bool:
    """True for the system's own error and for the text that safetensors makes of it."""
    if isinstance(fault, OSError):
        return fault.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    full = ("No space left", "quota exceeded", "File too large")
    return isinstance(fault, SafetensorError) and any(words in str(fault) for words in full)


def _seal(folder: Path) -> None:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    hashes = {str(file.relative_to(folder)): _sha256(file) for file in files}
    (folder / MANIFEST).write_text(json.dumps(hashes, indent=1))
    for file in (*files, folder / MANIFEST):
        flush(file)
    flush(folder)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
