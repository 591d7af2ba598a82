"""The trials of a sweep: what each is told, how it ended, the folder that keeps them, and their ranking."""

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from app.errors import AppError, CheckpointError, ConfigError
from app.files import write_json
from app.tracking.formatting import (
    format_count,
)
from app.tracking.output_dir import ClaimedFolder, names_in, shown_names
from app.tracking.redact import masked

if TYPE_CHECKING:
    from rich.table import Table

PENDING, RUNNING, FAILED, STOPPED = "pending", "running", "failed", "stopped"
FINISHED, DRY_RUN = "finished", "dry_run"
_CONTENT = "sweep.json"
_MAX_NAME_CHARACTERS = 96
_BRACKETS = re.compile(r"[\[\]{}()'\"]")
_UNSAFE = re.compile(r"[^\w.=,+-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Trial:
    """`overrides` are all it is told, `swept` those in which trials differ, `name` is that of its folder.

    `proposed` is the point of a space that a search chose, in the search's own terms. Number 0 is a point that is only
    checked, not run.
    """

    number: int
    overrides: tuple[str, ...]
    swept: tuple[str, ...]
    name: str
    proposed: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A trial as it stands in sweep.json. `values` has what is swept, typed; `seconds` are those of all its starts."""

    number: int
    overrides: Sequence[str]
    swept: Sequence[str]
    folder: str
    values: Mapping[str, Any] = field(default_factory=dict)
    proposed: Mapping[str, Any] | None = None
    status: str = PENDING
    objective: float | None = None
    steps: int | None = None
    tokens_per_second: float | None = None
    seconds: float = 0.0
    exit_code: int | None = None
    error: str | None = None


def shown(swept: Sequence[str]) -> str:
    """What is special about a trial, for people."""
    return " ".join(text.lstrip("+") for text in swept)


def name_of(number: int, digits: int, swept: Sequence[str]) -> str:
    """For a folder, on any file system: the number makes it unique, the rest is for people and may be cut."""
    words = _UNSAFE.sub("_", _BRACKETS.sub("", shown(swept).replace(" ", ",")))
    return f"{number:0{digits}}-{words}"[:_MAX_NAME_CHARACTERS].rstrip("-._,")


def key_of(text: str) -> str:
    """Of an override, without the prefix that says how it is set."""
    return text.partition("=")[0].lstrip("+~")


def values_of(overrides: Sequence[str]) -> dict[str, Any]:
    """By key, as numbers, lists and text."""
    return {key_of(text): value_of(text) for text in overrides}


@cache
def value_of(text: str) -> Any:
    """As Hydra reads it; what needs quotes is text, and what JSON has no number for."""
    try:
        value = OverridesParser.create().parse_override(text).value()
    except HydraException:
        return text.partition("=")[2]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class SweepFolder(ClaimedFolder):
    """One sweep, and one process at work in it; only the one that `claim` gave may be written to."""

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
            before = folder.read()
            if before and before["identity"] != identity:
                raise ConfigError(
                    f"output_dir={given}: the folder has another sweep; choose another output_dir, or continue "
                    f"that one: {shlex.join(before['command'])}"
                )
        except AppError:
            folder.release()
            raise
        return folder

    @property
    def content(self) -> Path:
        """What the sweep is and how its trials ended."""
        return self.path / _CONTENT

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


def _refuse_foreign(path: Path, given: str) -> None:
    """Only an empty folder, or one that has a sweep."""
    names = names_in(path, given)
    if names and _CONTENT not in names:
        raise ConfigError(
            f"output_dir={given}: the folder is not empty and not that of a sweep (it has {shown_names(names)}); "
            "choose a new or empty folder"
        )


def ranked(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The lowest objective first; those that have none (failed, not a number) last, in their order."""
    return sorted(outcomes, key=lambda each: (each.objective is None, each.objective or 0.0, each.number))


def best(outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    """For sweep.json; `line` is what to type after `python -m app.train`. None when no trial has an objective."""
    first = next(iter(ranked(outcomes)), None)
    if first is None or first.objective is None or first.status != FINISHED:
        return None
    return {
        "number": first.number,
        "objective": first.objective,
        "folder": first.folder,
        "overrides": list(first.overrides),
        "line": shlex.join(first.overrides),
    }


def leaderboard(outcomes: Sequence[Outcome]) -> "Table":
    """A row for each trial, a column for each setting in which they differ."""
    from rich.table import Table

    settings = [key_of(text) for each in outcomes[:1] for text in each.swept]
    head = ("rank", "trial", "objective", "steps", "tokens/s", *settings, "status")
    table = Table(*head, box=None, pad_edge=False)
    for column in table.columns[:5]:
        column.justify = "right"
    for rank, each in enumerate(ranked(outcomes), 1):
        table.add_row(
            "-" if each.objective is None else str(rank),
            str(each.number),
            "-" if each.objective is None else f"{each.objective:.4f}",
            "-" if each.steps is None else str(each.steps),
            "-" if each.tokens_per_second is None else format_count(each.tokens_per_second),
            *(text.partition("=")[2] for text in each.swept),
            f"{each.status} ({each.exit_code})" if each.status == FAILED else each.status,
        )
    return table
