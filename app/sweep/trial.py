"""One run of a sweep: what it is told, and how it ended."""

from collections.abc import Sequence
from dataclasses import dataclass

PENDING, RUNNING, FAILED, STOPPED = "pending", "running", "failed", "stopped"
FINISHED, DRY_RUN = "finished", "dry_run"


@dataclass(frozen=True, slots=True)
class Trial:
    """`overrides` are all it is told, `swept` those in which trials differ, `name` is that of its folder."""

    number: int
    overrides: tuple[str, ...]
    swept: tuple[str, ...]
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A trial as it stands in sweep.json. `seconds` are those of all its starts."""

    number: int
    overrides: Sequence[str]
    swept: Sequence[str]
    folder: str
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
