"""Console output: a progress bar on a terminal, else lines. A broken stream never stops a run."""

import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

from app.program import as_started
from app.safe_text import printable
from app.tracking.formatting import step_line, step_parts

if TYPE_CHECKING:
    from rich.console import Console as Terminal
    from rich.progress import Progress
    from rich.table import Table

_MIN_REDRAW_SECONDS = 0.1
_BAR_NUMBERS = ("loss", "tokens_per_second")  # with the time left they fit next to the bar in 80 columns
_FILE_WIDTH = 240  # columns of a table in a file or pipe


class Console:
    """A bar at the bottom of a terminal and messages above it; one line per logged step in a pipe or file.

    The bar is redrawn at each step, without a thread. With `enabled=False` (ranks other than 0) nothing is shown.
    """

    def __init__(self, stream: TextIO | None = None, *, enabled: bool = True) -> None:
        self._stream = SafeStream(stream or sys.stdout)
        self._enabled = enabled
        self._progress = _progress(self._stream) if enabled and self._stream.is_terminal() else None
        self._total: int | None = None
        self._drawn = 0.0

    def begin(self, total: int, done: int) -> None:
        """Show progress over `total` steps, of which `done` are from earlier starts."""
        self._total = total
        if self._progress:
            self._progress.add_task("", total=total, completed=done, numbers="")
            self._progress.start()

    def say(self, text: str) -> None:
        text = as_started(text)
        if self._progress:
            from rich.text import Text

            self._progress.console.print(Text(printable(text)), soft_wrap=True)
        elif self._enabled:
            self._stream.write(f"{printable(text)}\n")
            self._stream.flush()

    def step(self, values: Mapping[str, Any], seconds_left: float | None = None) -> None:
        if self._progress:
            shown = {key: values.get(key) for key in _BAR_NUMBERS}
            self.progress(values["step"], " | ".join(step_parts(shown, seconds_left)))
        else:
            self.say(step_line(values, self._total, seconds_left))

    def progress(self, completed: int, text: str) -> None:
        """Update the progress bar of a terminal."""
        now = time.monotonic()
        if self._progress:
            for task in self._progress.task_ids:
                self._progress.update(task, completed=completed, numbers=printable(text))
            if now - self._drawn >= _MIN_REDRAW_SECONDS or completed == self._total:
                self._progress.refresh()
                self._drawn = now

    def close(self) -> None:
        """Leave the last bar on the screen and restore the cursor."""
        if self._progress and self._progress.live.is_started:
            self._progress.refresh()
            self._progress.stop()


class SafeStream:
    """Stream that drops output after an error: a closed pipe, a closed terminal, a full disk."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._broken = False

    @property
    def encoding(self) -> str:
        return self._stream.encoding or "utf-8"

    def write(self, text: str) -> int:
        """Write; characters missing in the encoding become question marks."""
        if not self._broken:
            try:
                self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
            except (OSError, ValueError):
                self._fall_silent()
        return len(text)

    def flush(self) -> None:
        if not self._broken:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._fall_silent()

    def isatty(self) -> bool:
        """Return whether it is a terminal; False for a closed stream."""
        try:
            return self._stream.isatty()
        except ValueError:
            return False

    def is_terminal(self) -> bool:
        """Return whether it is a terminal that can move the cursor, by TERM."""
        return self.isatty() and os.environ.get("TERM", "") not in {"", "dumb", "unknown"}

    def fileno(self) -> int:
        return self._stream.fileno()

    def _fall_silent(self) -> None:
        self._broken = True
        # the rest of the buffer would fail again when the interpreter ends, with exit code 120
        with suppress(OSError, ValueError):
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self._stream.fileno())
            os.close(devnull)


class _LogToConsole(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.say(record.getMessage())


def open_console(stream: TextIO | None = None) -> Console:
    """Return a console, by default on standard output, that also prints the log records of `app.*`."""
    console = Console(stream)
    logger = logging.getLogger("app")
    logger.handlers[:] = [_LogToConsole(console)]
    logger.setLevel(logging.INFO)
    logger.propagate = False  # Hydra would write them to another file
    return console


def rich_terminal(stream: SafeStream) -> "Terminal":
    """Return a rich console on the stream; it honors NO_COLOR and the width of a terminal."""
    from rich.console import Console as Terminal

    width = None if stream.is_terminal() else _FILE_WIDTH
    return Terminal(file=cast(TextIO, stream), width=width, markup=False, highlight=False, emoji=False)


def print_table(stream: SafeStream, table: "Table") -> None:
    """Print a table; in a pipe or file at full width, without trailing spaces."""
    terminal = rich_terminal(stream)
    if stream.is_terminal():
        terminal.print(table)
        return
    with terminal.capture() as captured:
        terminal.print(table)
    stream.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
    stream.flush()


def _progress(stream: SafeStream) -> "Progress":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    return Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[numbers]}", markup=False),
        console=rich_terminal(stream),
        auto_refresh=False,
    )
