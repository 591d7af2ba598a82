"""Data files that the board received, in a folder next to the runs."""

import filecmp
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import BinaryIO

from app.errors import ConfigError
from app.files import is_own_file, report_write_errors

UPLOADS = "uploads"
MAX_UPLOAD_BYTES = 2 << 30
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")
_UNSAFE = re.compile(r"[^\w.-]+", re.ASCII)
_MAX_NAME_CHARACTERS = 100


def upload_path(folder: Path, name: str) -> Path:
    """Return the file for an upload, with a name that is safe in addresses and settings."""
    if "/" in name or "\\" in name or name.startswith("."):
        raise ConfigError(f"upload {name}: not a file name. Rename the file to letters, digits, dots and dashes.")
    path = folder / UPLOADS / _UNSAFE.sub("_", name)[-_MAX_NAME_CHARACTERS:]
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"upload {name}: not a data file. Upload one of {' '.join(SUFFIXES)}")
    return path


def check_upload_size(content_length: str | None) -> None:
    """Raise an error for a request without a length, or with one beyond the limit, before its body is read."""
    if not (content_length or "").isdecimal() or int(content_length or 0) > MAX_UPLOAD_BYTES:
        limit = f"{MAX_UPLOAD_BYTES >> 30} GB"
        raise ConfigError(f"upload: larger than {limit}. Copy the file to this machine and set dataset.path=FILE.")


def save_upload(folder: Path, name: str, content: BinaryIO) -> Path:
    """Write an upload and return its file: a new one, unless the same content has this name already."""
    target = upload_path(folder, name)
    with report_write_errors(target):
        target.parent.mkdir(exist_ok=True)
        if target.parent.is_symlink():
            raise ConfigError(f"{target.parent} is a symbolic link. Replace it by a folder.")
        with NamedTemporaryFile(dir=target.parent, prefix=".", suffix=".partial") as partial:
            shutil.copyfileobj(content, partial, 1 << 20)
            partial.flush()
            os.fsync(partial.fileno())
            return _placed(Path(partial.name), target)


def _placed(partial: Path, target: Path) -> Path:
    """Link a written file to the first name that is unused or has the same content."""
    for path in _names(target):
        with suppress(FileExistsError):
            os.link(partial, path)  # unlike a rename, replaces nothing
            return path
        if is_own_file(path) and filecmp.cmp(partial, path, shallow=False):
            return path
    raise AssertionError


def _names(target: Path) -> Iterator[Path]:
    yield target
    yield from (target.with_name(f"{target.stem}-{at}{target.suffix}") for at in itertools.count(2))
