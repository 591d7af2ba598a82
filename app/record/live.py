"""The progress bar of a terminal. Drawn when there is something new: no thread runs beside the training."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO, cast

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from app.record.console import SafeStream
from app.record.lines import Sample, printable, step_parts

_SECONDS_BETWEEN_DRAWINGS = 0.1


class LiveConsole:
    """A bar at the bottom, messages above it. Rich honours NO_COLOR and the width of the terminal."""

    def __init__(self, stream: SafeStream) -> None:
        self._terminal = Terminal(file=cast(TextIO, stream), markup=False, highlight=False, emoji=False)
        self._progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=self._terminal,
            auto_refresh=False,
        )
        self._total: int | None = None
        self._drawn = 0.0

    def begin(self, total: int, done: int) -> None:
        """The bar appears."""
        self._total = total
        self._progress.add_task("", total=total, completed=done, numbers="")
        self._progress.start()

    def say(self, text: str) -> None:
        """Above the bar."""
        self._terminal.print(Text(printable(text)), soft_wrap=True)

    def step(self, values: Mapping[str, Any], seconds_left: float | None = None) -> None:
        """Moves the bar."""
        numbers = " | ".join(step_parts(values, seconds_left))
        for task in self._progress.task_ids:
            self._progress.update(task, completed=values["step"], numbers=numbers)
        now = time.monotonic()
        if now - self._drawn >= _SECONDS_BETWEEN_DRAWINGS or values["step"] == self._total:
            self._progress.refresh()
            self._drawn = now

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """A table as wide as the terminal."""
        table = Table(
            "prompt", "expected", "answer", title=f"samples at step {step}", show_lines=True, expand=True
        )
        for each in samples:
            table.add_row(*(Text(printable(text)) for text in (each.prompt, each.expected, each.given)))
        self._terminal.print(table)

    def close(self) -> None:
        """The last bar stays, the cursor comes back."""
        if self._progress.live.is_started:
            self._progress.refresh()
            self._progress.stop()
