"""What a process that is not the first one records: its messages, in a file of its own."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Self

from app.record.files import append_text
from app.record.folder import RunFolder
from app.record.lines import Sample, aligned
from app.record.masking import masked_text


class Follower:
    """In place of a Record: the numbers are those of the first process, which writes them for all."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self.folder = folder
        self._log = folder.log_of(rank)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if fault is not None:
            self.message(f"{type(fault).__name__}: {fault}")

    def add_facts(self, **facts: Any) -> None:
        """The manifest is the first process's."""

    def message(self, text: str) -> None:
        """To this process's own log."""
        now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        append_text(self._log, f"{now}  {masked_text(text)}\n")

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Names and values in two columns."""
        self.message(aligned(rows))

    def begin(self, total: int, done: int = 0) -> None:
        """Progress is shown by the first process."""

    def rewind(self, step: int) -> None:
        """So is what is taken back."""

    def step(self, values: Mapping[str, float | int | None], seconds_left: float | None = None) -> None:
        """And each line of metrics."""

    def evaluation(self, values: Mapping[str, float | int | None]) -> None:
        """And each evaluation."""

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """And each answer."""

    def sync(self) -> None:
        """Nothing that a checkpoint counts on."""

    def finish(self, status: str, **result: Any) -> None:  # noqa: ARG002  the first process writes the result
        """How it ended, in a line."""
        self.message(status)


class SilentConsole:
    """The screen belongs to the first process."""

    def begin(self, total: int, done: int) -> None:
        """Nothing is shown."""

    def say(self, text: str) -> None:
        """Nothing is shown."""

    def step(self, values: Mapping[str, Any], seconds_left: float | None = None) -> None:
        """Nothing is shown."""

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Nothing is shown."""

    def close(self) -> None:
        """Nothing was opened."""
