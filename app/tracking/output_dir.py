"""Output folder of a run or sweep: file names, the lock for one process, and append-only JSON lines.

Numbers in JSON lines are read back exactly. JSON has no NaN and no infinity: they are written as null.
"""

import errno
import fcntl
import json
import math
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from app.errors import ConfigError, EnvironmentProblem
from app.files import (
    append_text,
    fsync,
    is_partial,
    read_object,
    report_write_errors,
    require_file_operations,
    write_text,
)
from app.safe_text import listed
from app.tracking.formatting import finite_number

_LOCK = ".lock"
_RUN_FILES = {
    "run.yaml",
    "manifest.json",
    "metrics.jsonl",
    "samples.jsonl",
    "result.json",
    "log.txt",
    "checkpoints",
    "final",
    "base",
    "reference",
    "start",
}
_CHECK_FILES = {"check.json", "check.html"}  # of finetune check, in the folder of a later run
# on file systems without locks a folder is used unlocked rather than refused
_NO_LOCK_SUPPORT = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_locks: set[int] = set()  # lock descriptors of this process


class _LockedError(Exception):
    """Another process has the lock; the text names it if possible."""


class ClaimedFolder:
    """A folder locked by this process. The lock ends with the process, even after a kill."""

    def __init__(self, path: Path, descriptor: int | None = None, created: tuple[Path, ...] = ()) -> None:
        self.path = path
        self._descriptor = descriptor
        self._created = created

    @classmethod
    def _claim(cls, output_dir: str, path: Path, refuse: Callable[[Sequence[str]], None]) -> Self:
        """Create the folder if needed and lock it. If `refuse` raises for its names, nothing is changed."""
        if os.path.lexists(path) and not path.is_dir():
            raise EnvironmentProblem(f"output_dir={output_dir}: not a folder; choose a new or empty folder")
        created = tuple(folder for folder in (path, *path.parents) if not folder.exists())
        claimed = cls(path, None, created)
        try:
            with report_write_errors(path):
                path.mkdir(parents=True, exist_ok=True)
                _refuse_links(path, output_dir)
                claimed._descriptor = _take_lock(path / _LOCK)
            names = sorted(entry.name for entry in path.iterdir())
            # without locks, files of finetune check and leftovers of a kill
            refuse([name for name in names if name not in {_LOCK, *_CHECK_FILES} and not is_partial(name)])
            with report_write_errors(path):
                require_file_operations(path)
        except _LockedError as locked:
            raise EnvironmentProblem(
                f"output_dir={output_dir}: in use by {locked}; wait for it to end, or choose another output_dir"
            ) from None
        except BaseException:  # a signal too
            claimed.release()
            claimed._remove_created()
            raise
        return claimed

    def release(self) -> None:
        """Unlock the folder, and remove it if it was created and is empty. A forked child does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and descriptor in _locks:
            _locks.remove(descriptor)
            with suppress(OSError):
                (self.path / _LOCK).unlink()
            os.close(descriptor)
            self._remove_created()

    def _remove_created(self) -> None:
        for folder in self._created:
            with suppress(OSError):
                (folder / _LOCK).unlink()
            with suppress(OSError):
                folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class RunFolder(ClaimedFolder):
    """Files of a run, an interface for other programs; only a folder from `claim` may be written to."""

    def __init__(self, path: Path, descriptor: int | None = None, created: tuple[Path, ...] = ()) -> None:
        super().__init__(path, descriptor, created)
        self.run_yaml = path / "run.yaml"  # the resolved configuration
        self.manifest = path / "manifest.json"  # versions, commit, seed, choices, counts, hashes
        self.metrics = path / "metrics.jsonl"  # one object per logged step or evaluation
        self.samples = path / "samples.jsonl"  # one object per answered prompt
        self.preview = path / "preview.json"  # a few training rows as text, with their loss mask
        self.report = path / "report.html"  # the HTML page
        self.result = path / "result.json"  # status and metrics; absent during the run
        self.profile = path / "profile.json"  # time of a profiled step by kind of operation
        self.trace = path / "trace.json"  # of that step, for Perfetto
        self.log = path / "log.txt"  # all messages as plain text
        self.checkpoints = path / "checkpoints"  # one folder per saved step
        self.final = path / "final"  # the adapter or the model, as other tools load it
        self.base = path / "base"  # a random base, which an adapter needs
        self.reference = path / "reference"  # reference model of preference tuning
        self.start = path / "start"  # initial weights of an adapter that was split off the base

    @classmethod
    def joined(cls, output_dir: str) -> "RunFolder":
        """Return the folder, claimed by another process of the run."""
        return cls(Path(output_dir).expanduser().absolute())

    @classmethod
    def claim(cls, output_dir: str, resume: str | None) -> "RunFolder":
        """Lock the folder for this process."""
        path = cls.joined(output_dir).path
        return cls._claim(output_dir, path, lambda names: _refuse_foreign(path, output_dir, resume, names))


def lock_owner(folder: Path) -> str | None:
    """Return the name of the process that has locked a folder, without writing to it."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR)
    except OSError:
        return None
    try:
        _lock(descriptor)
    except _LockedError as locked:
        return str(locked)
    finally:
        os.close(descriptor)
    return None


def _refuse_links(path: Path, output_dir: str) -> None:
    """Raise if the folder has symbolic links, through which files would be written elsewhere."""
    links = [entry.name for entry in path.iterdir() if entry.is_symlink()]
    if links:
        raise EnvironmentProblem(
            f"output_dir={output_dir}: {listed(links, 4)} is a symbolic link; replace it by its target, "
            "or choose another output_dir"
        )


def _refuse_foreign(path: Path, output_dir: str, resume: str | None, names: Sequence[str]) -> None:
    """Raise if the folder is not empty, unless it has the run to resume or only a dry run."""
    is_dry = "checkpoints" not in names and read_object(path / "result.json").get("status") == "dry_run"
    if not names or is_dry:
        return
    shown = listed(names, 4)
    if not _RUN_FILES.intersection(names):
        raise ConfigError(
            f"output_dir={output_dir}: the folder is not empty and not a run (found {shown}); "
            "choose a new or empty folder"
        )
    if resume is None:
        raise ConfigError(
            f"output_dir={output_dir}: the folder already has a run (found {shown}); "
            "set resume=auto to resume it, or choose another output_dir"
        )
    if resume != "auto" and not Path(resume).expanduser().resolve().is_relative_to(path.resolve()):
        raise ConfigError(
            f"resume={resume}: output_dir={output_dir} already has another run (found {shown}); "
            "choose another output_dir, or set resume=auto to resume the run in it"
        )


def _take_lock(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            _lock(descriptor)
            if _is_still(path, descriptor):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                _locks.add(descriptor)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the last owner removed the file after it was opened


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as fault:
        if fault.errno in _NO_LOCK_SUPPORT:
            return
        if not isinstance(fault, BlockingIOError):
            raise
        owner = os.pread(descriptor, 200, 0).decode(errors="replace")
        raise _LockedError(owner or "another process") from None


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _close_in_child() -> None:
    # all copies of the descriptor share the lock: a worker that outlives a killed run would keep it
    for descriptor in _locks:
        os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_close_in_child)


# ---- jsonl metrics


class StepLog:
    """A file of JSON objects with a `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, values: Mapping[str, Any]) -> None:
        """Append a line; keys keep their order."""
        assert "step" in values
        finite = {key: finite_or_none(value) for key, value in values.items()}
        append_text(self.path, json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n")

    def fsync(self) -> None:
        """Flush appended lines to disk, safe against a power cut."""
        if self.path.exists():
            with report_write_errors(self.path):
                fsync(self.path)

    def truncate_after(self, step: int) -> list[dict[str, Any]]:
        """Remove lines after `step` and incomplete lines; return the others."""
        if not self.path.exists():
            return []
        with self.path.open(encoding="utf-8", errors="replace") as file:
            lines = list(file)
        remaining = [(line, values) for line in lines if (values := _parse(line)) and values["step"] <= step]
        if len(remaining) < len(lines):
            write_text(self.path, "".join(line for line, _ in remaining))
        return [values for _, values in remaining]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a file that may still be written to."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if values := _parse(line):
                yield values


def smoothed_loss(lines: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the mean of the last tenth of the logged training losses: 10 to 100 of them, at most half of all."""
    losses = [loss for line in lines if (loss := finite_number(line.get("loss"))) is not None]
    count = min(max(len(losses) // 10, 10), 100, max(len(losses) // 2, 1))
    return fmean(losses[-count:]) if losses else None


def with_smoothed_loss(result: Mapping[str, Any], metrics: Path) -> dict[str, Any]:
    """Return a result with `train_loss`, the smoothed loss at its last step; None if unknown."""
    is_known = result.get("train_loss_last") is not None and metrics.exists()
    lines = (line for line in read_lines(metrics) if line["step"] <= result["steps"]) if is_known else ()
    return {**result, "train_loss": smoothed_loss(lines)}


def finite_or_none(value: Any) -> Any:
    """Return the value, or None for NaN and infinity, which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse(line: str) -> dict[str, Any] | None:
    if not line.endswith("\n"):
        return None
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and isinstance(values.get("step"), int) else None
