"""The output folder of a run: where things are in it, and who may use it."""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from app.errors import AppError, ConfigError, EnvironmentProblem
from app.record import lock
from app.record.files import is_partial, writing

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


@dataclass(slots=True)
class RunFolder:
    """An interface that other programs read; only the one that `claim` gave may be written to."""

    path: Path
    _lock: int | None = None
    _made: tuple[Path, ...] = ()

    @property
    def run_yaml(self) -> Path:
        """The resolved configuration."""
        return self.path / "run.yaml"

    @property
    def manifest(self) -> Path:
        """Where the run comes from: versions, commit, seed, choices, counts, hashes."""
        return self.path / "manifest.json"

    @property
    def metrics(self) -> Path:
        """One object per logged step or evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """One object per answered prompt."""
        return self.path / "samples.jsonl"

    @property
    def preview(self) -> Path:
        """A few training rows as text, with what is trained of them."""
        return self.path / "preview.json"

    @property
    def report(self) -> Path:
        """The page for people."""
        return self.path / "report.html"

    @property
    def result(self) -> Path:
        """How it ended; absent while it runs."""
        return self.path / "result.json"

    @property
    def log(self) -> Path:
        """Everything that was said, as plain text."""
        return self.path / "log.txt"

    def log_of(self, rank: int) -> Path:
        """What another process than the first one said."""
        return self.path / f"log-rank-{rank}.txt"

    @property
    def checkpoints(self) -> Path:
        """One folder per saved step."""
        return self.path / "checkpoints"

    @property
    def final(self) -> Path:
        """The adapter or the model, as other tools load it."""
        return self.path / "final"

    @property
    def base(self) -> Path:
        """The random base that nothing else could make again."""
        return self.path / "base"

    @classmethod
    def joined(cls, output_dir: str) -> "RunFolder":
        """The folder that another process of the same run has claimed."""
        return cls(Path(output_dir).expanduser().absolute())

    @classmethod
    def claim(cls, output_dir: str, resume: str | None) -> "RunFolder":
        """The folder for this process alone, made if need be. A refusal leaves everything as it was."""
        path = Path(output_dir).expanduser().absolute()
        with writing(path):
            if user := lock.holder(path / _LOCK):
                raise EnvironmentProblem(_in_use(output_dir, user))
            _refuse_foreign(path, output_dir, resume)
            made = [folder for folder in (path, *path.parents) if not folder.exists()]
            try:
                path.mkdir(parents=True, exist_ok=True)
                claimed = cls(path, lock.take(path / _LOCK), tuple(made))
            except lock.LockedError as locked:
                raise EnvironmentProblem(_in_use(output_dir, str(locked))) from None
            except OSError:
                _remove(made)
                raise
            try:
                _refuse_foreign(path, output_dir, resume)  # another process may have come and gone since
            except AppError:
                claimed.release()
                raise
        return claimed

    def release(self) -> None:
        """Others may claim it; a folder that we made and left empty goes. A process that ends releases by ending."""
        if self._lock is not None:
            lock.release(self.path / _LOCK, self._lock)
            self._lock = None
            _remove(self._made)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def user_of(path: Path) -> str | None:
    """The process that has claimed a folder, in words."""
    return lock.holder(path / _LOCK)


def _refuse_foreign(path: Path, output_dir: str, resume: str | None) -> None:
    """Only an empty folder, or the run's own when it is to be continued."""
    if path.exists() and not path.is_dir():
        raise EnvironmentProblem(f"output_dir={output_dir}: this is a file; choose a new or empty folder")
    names = _names_in(path)
    if not names or _is_only_a_plan(path, names):
        return
    shown = f"{', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
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


def _names_in(path: Path) -> list[str]:
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except FileNotFoundError:
        return []
    return [name for name in names if name not in {_LOCK, *_BEFORE_A_RUN} and not is_partial(name)]


def _in_use(output_dir: str, user: str) -> str:
    return f"output_dir={output_dir}: {user} is using it; wait until that ends, or choose another output_dir"


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            (folder / _LOCK).unlink()
        with suppress(OSError):
            folder.rmdir()
