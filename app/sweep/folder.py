"""The folder of a sweep: one name for one command, one sweep in it, one process at work in it."""

import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from app.errors import AppError, CheckpointError, ConfigError
from app.record.files import write_json
from app.record.masking import masked
from app.record.output_dir import ClaimedFolder, names_in, shown_names
from app.sweep.expansion import Setting
from app.sweep.preset import NO_PRESET, Preset
from app.sweep.trial import Outcome

_CONTENT = "sweep.json"
_LONGEST_WORDS = 48
_OF_ONE_START = ("output_dir", "dry_run")  # they do not make it another sweep


def identity_of(settings: Sequence[Setting], preset: Preset = NO_PRESET) -> str:
    """The same for the same command, however its numbers are written; a search may get more trials later."""
    same: list[Any] = [setting.same for setting in settings if setting.key not in _OF_ONE_START]
    if preset.name:
        same.append(asdict(preset.config) | {"trials": None})
    return hashlib.sha256(json.dumps(same).encode()).hexdigest()


def default_path(settings: Sequence[Setting], preset: Preset = NO_PRESET) -> str:
    """A name that the same command finds again."""
    swept = (setting.key.rpartition(".")[2] for setting in settings if setting.is_swept)
    words = "-".join(filter(None, ("sweep", preset.name, *swept)))[:_LONGEST_WORDS].rstrip("-")
    return f"runs/{words}-{identity_of(settings, preset)[:8]}"


class SweepFolder(ClaimedFolder):
    """Only the one that `claim` gave may be written to."""

    @classmethod
    def claim(cls, given: str, identity: str) -> "SweepFolder":
        """The folder for this process alone."""
        path = Path(given).expanduser()
        folder = cls._claim(
            path,
            lambda: _refuse_foreign(path, given),
            lambda user: (
                f"output_dir={given}: {user} is at work on this sweep; "
                "wait until that ends, or choose another output_dir"
            ),
        )
        try:
            folder._refuse_another(given, identity)
        except AppError:
            folder.release()
            raise
        return folder

    @property
    def content(self) -> Path:
        """What the sweep is and how its trials ended."""
        return self.path / _CONTENT

    @property
    def report(self) -> Path:
        """The same as a page for people."""
        return self.path / "report.html"

    def read(self) -> dict[str, Any]:
        """What an earlier start wrote; nothing if there was none."""
        if not self.content.exists():
            return {}
        try:
            values: dict[str, Any] = json.loads(self.content.read_text(encoding="utf-8"))
        except ValueError as fault:
            raise CheckpointError(
                f"{self.content} cannot be read ({fault}): restore it, or choose another output_dir"
            ) from fault
        return values

    def write(self, facts: dict[str, Any], trials: Sequence[Outcome]) -> None:
        """All of it anew, so that others can watch."""
        write_json(self.content, masked({**facts, "trials": [asdict(each) for each in trials]}))

    def _refuse_another(self, given: str, identity: str) -> None:
        before = self.read()
        if before and before["identity"] != identity:
            raise ConfigError(
                f"output_dir={given}: the folder has another sweep; choose another output_dir, or continue "
                f"that one: {shlex.join(before['command'])}"
            )


def _refuse_foreign(path: Path, given: str) -> None:
    """Only an empty folder, or one that has a sweep."""
    names = names_in(path, given)
    if names and _CONTENT not in names:
        raise ConfigError(
            f"output_dir={given}: the folder is not empty and not that of a sweep (it has {shown_names(names)}); "
            "choose a new or empty folder"
        )
