"""The folder of an export: checked before, written whole or not at all, hashed. Imports no torch."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.errors import ConfigError, EnvironmentProblem
from app.files import atomic_folder, fsync_all, is_disk_full, read_object

REPORT = "export.json"


def require_target(given: str, target: Path) -> None:
    """Refuse a target that is not new or empty, unless it only has the report of a failed export."""
    if target.is_file():
        raise ConfigError(f"to={given}: this is a file. Give a new or empty folder.")
    names = sorted(file.name for file in target.iterdir()) if target.is_dir() else []
    has_only_failed_report = names == [REPORT] and read_object(target / REPORT).get("passed") is False
    if names and not has_only_failed_report:
        shown = ", ".join(names[:4])
        raise ConfigError(f"to={given}: the folder is not empty (it has {shown}). Give a new or empty folder.")
    place = existing_parent(target)
    if not os.access(place, os.W_OK):
        raise EnvironmentProblem(f"to={given}: {place} cannot be written to. Give another folder.")


@contextmanager
def atomic_export(target: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `target` when all of it is on the disk, and deleted on any error."""
    try:
        with atomic_folder(target, fsync_all) as folder:
            yield folder
    except BaseException as fault:
        if is_disk_full(fault):
            raise EnvironmentProblem(
                f"to={target}: the disk is full, nothing was exported. Free space, or give a folder on another disk."
            ) from fault
        if isinstance(fault, OSError) and fault.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise EnvironmentProblem(f"to={target}: cannot be written ({fault.strerror}).") from fault
        raise


def write_json_unflushed(path: Path, value: Any) -> None:
    """Write JSON into a folder that is fsynced as a whole later."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def existing_parent(target: Path) -> Path:
    """The nearest folder above `target` that exists."""
    return next(folder for folder in (target, *target.parents) if folder.exists())
