"""The output folder of a run or sweep: where things are in it, and the lock that keeps it to one process."""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from app.errors import AppError, ConfigError, EnvironmentProblem
from app.files import is_partial, report_write_errors

_LOCK = ".lock"
_NAMES = {
    "run.yaml",
    "manifest.json",
    "metrics.jsonl",
    "samples.jsonl",
    "result.json",
    "log.txt",
    "checkpoints",
    "final",
    "base",
}
_BEFORE_A_RUN = {"check.json", "check.html"}  # what app.check leaves in the folder of a run to come
# File systems that know no locks: there nobody is kept out, which is better than keeping everybody out.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_locks: set[int] = set()  # descriptors of this process


class _LockedError(Exception):
    """Another process has the lock; the text says which, as far as it is known."""


class ClaimedFolder:
    """A folder that this process alone may write to. The lock ends with the process, however that ends."""

    def __init__(self, path: Path, descriptor: int | None = None, made: tuple[Path, ...] = ()) -> None:
        self.path = path
        self._descriptor = descriptor
        self._made = made

    @classmethod
    def _claim(cls, path: Path, refuse: Callable[[], None], in_use: Callable[[object], str]) -> Self:
        """Made if need be. `refuse` raises what speaks against it; a refusal leaves everything as it was."""
        with report_write_errors(path):
            if user := user_of(path):
                raise EnvironmentProblem(in_use(user))
            refuse()
            made = [folder for folder in (path, *path.parents) if not folder.exists()]
            claimed = cls(path, None, tuple(made))
            try:
                path.mkdir(parents=True, exist_ok=True)
                claimed._descriptor = _take_lock(path / _LOCK)
            except _LockedError as locked:
                raise EnvironmentProblem(in_use(locked)) from None
            except OSError:
                claimed._remove_made()
                raise
            try:
                refuse()  # another process may have come and gone since
            except AppError:
                claimed.release()
                raise
        return claimed

    def release(self) -> None:
        """Let others claim it; a folder that was made and left empty goes. Nothing in a forked child."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and descriptor in _locks:
            _locks.remove(descriptor)
            with suppress(OSError):
                (self.path / _LOCK).unlink()
            os.close(descriptor)
            self._remove_made()

    def _remove_made(self) -> None:
        for folder in self._made:
            with suppress(OSError):
                (folder / _LOCK).unlink()
            with suppress(OSError):
                folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class RunFolder(ClaimedFolder):
    """An interface that other programs read; only the one that `claim` gave may be written to."""

    def __init__(self, path: Path, descriptor: int | None = None, made: tuple[Path, ...] = ()) -> None:
        super().__init__(path, descriptor, made)
        self.run_yaml = path / "run.yaml"  # the resolved configuration
        self.manifest = path / "manifest.json"  # versions, commit, seed, choices, counts, hashes
        self.metrics = path / "metrics.jsonl"  # one object per logged step or evaluation
        self.samples = path / "samples.jsonl"  # one object per answered prompt
        self.preview = path / "preview.json"  # a few training rows as text, with what is trained of them
        self.report = path / "report.html"  # the page for people
        self.result = path / "result.json"  # how it ended; absent while it runs
        self.log = path / "log.txt"  # everything that was said, as plain text
        self.checkpoints = path / "checkpoints"  # one folder per saved step
        self.final = path / "final"  # the adapter or the model, as other tools load it
        self.base = path / "base"  # the random base that nothing else could make again

    def log_of(self, rank: int) -> Path:
        """What a process said; numbers in the name for all but the first."""
        return self.path / f"log-rank-{rank}.txt" if rank else self.log

    @classmethod
    def joined(cls, output_dir: str) -> "RunFolder":
        """The folder that another process of the same run has claimed."""
        return cls(Path(output_dir).expanduser().absolute())

    @classmethod
    def claim(cls, output_dir: str, resume: str | None) -> "RunFolder":
        """The folder for this process alone."""
        path = cls.joined(output_dir).path
        return cls._claim(
            path,
            lambda: _refuse_foreign(path, output_dir, resume),
            lambda user: (
                f"output_dir={output_dir}: {user} is using it; "
                "wait until that ends, or choose another output_dir"
            ),
        )


def user_of(folder: Path) -> str | None:
    """The process that has claimed a folder, in words; nothing is written."""
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


def names_in(path: Path, given: str) -> list[str]:
    """What a folder has besides locks, plans and what a kill leaves behind; nothing where there is none."""
    if path.exists() and not path.is_dir():
        raise EnvironmentProblem(f"output_dir={given}: this is a file; choose a new or empty folder")
    names = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
    return [name for name in names if name not in {_LOCK, *_BEFORE_A_RUN} and not is_partial(name)]


def shown_names(names: list[str]) -> str:
    """The first few of them."""
    return f"{', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"


def _refuse_foreign(path: Path, output_dir: str, resume: str | None) -> None:
    """Only an empty folder, or the run's own when it is to be continued."""
    names = names_in(path, output_dir)
    if not names or _is_only_a_plan(path, names):
        return
    shown = shown_names(names)
    if not _NAMES.intersection(names):
        raise ConfigError(
            f"output_dir={output_dir}: the folder is not empty and not that of a run (it has {shown}); "
            "choose a new or empty folder"
        )
    if resume is None:
        raise ConfigError(
            f"output_dir={output_dir}: the folder already has a run (it has {shown}); "
            "type resume=auto to continue that run, or choose another output_dir"
        )
    if resume != "auto" and not Path(resume).expanduser().resolve().is_relative_to(path.resolve()):
        raise ConfigError(
            f"resume={resume}: output_dir={output_dir} already has another run (it has {shown}), and the two "
            "would be mixed; choose another output_dir, or type resume=auto to continue the run that is there"
        )


def _is_only_a_plan(path: Path, names: list[str]) -> bool:
    """What `dry_run=true` wrote is no run: the next one may take its place."""
    if "checkpoints" in names or "result.json" not in names:
        return False
    result: dict[str, object] = json.loads((path / "result.json").read_text())
    return result.get("status") == "dry_run"


def _take_lock(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
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
        os.close(descriptor)  # its last owner removed the file in between


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as fault:
        if fault.errno in _NO_LOCKS:
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
    # A lock belongs to all copies of the descriptor: a worker that outlives a killed run would keep it.
    for descriptor in _locks:
        os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_close_in_child)
