"""What a tracker is to a run."""

from collections.abc import Mapping
from typing import Any, Protocol


class TrackerError(Exception):
    """It stopped working; the run goes on without it."""


class Tracker(Protocol):
    """One that is being written to."""

    @property
    def place(self) -> str | None:
        """Where the user finds it."""

    def log(self, values: Mapping[str, Any], /) -> None:
        """The numbers of one step or evaluation, `step` among them."""

    def rewind(self, step: int, /) -> None:
        """What was logged after `step` will be logged again."""

    def close(self, status: str, /) -> None:
        """Everything is out."""


class NoTracker:
    """metrics.jsonl only."""

    place = None

    def log(self, values: Mapping[str, Any], /) -> None:
        """Nowhere."""

    def rewind(self, step: int, /) -> None:
        """Nothing."""

    def close(self, status: str, /) -> None:
        """Nothing."""
