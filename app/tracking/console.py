"""Console output: a status line and a progress bar on a terminal, else lines. A broken stream never stops a run."""

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

from app.program import as_started
from app.safe_text import printable
from app.tracking.formatting import bar_text, step_line, truncate

if TYPE_CHECKING:
    from rich.console import Console as Terminal
    from rich.console import RenderableType
    from rich.live import Live
    from rich.table import Table

_MIN_REDRAW_SECONDS = 0.1
_MIN_BAR_WIDTH = 10
_MEAN_STEPS = 20  # logged steps in the mean loss of the bar
_FILE_WIDTH = 240  # columns of a table in a file or pipe


class Console:
    """A status line or a bar at the bottom of a terminal, messages above it; in a pipe or file a line per logged step.

    The bar is redrawn at each logged step, without a thread. With `enabled=False` (ranks other than 0) nothing is
    shown.
    """

    def __init__(self, stream: TextIO | None = None, *, enabled: bool = True) -> None:
        self._stream = SafeStream(stream or sys.stdout)
        self._enabled = enabled
        self._live = _live(self._stream) if enabled and self._stream.is_terminal() else None
        self._total: int | None = None
        self._on_gpu = False
        self._began = self._drawn = 0.0
        self._losses = deque[float](maxlen=_MEAN_STEPS)

    @property
    def width(self) -> int | None:
        """Columns of the terminal; None in a pipe or file."""
        return self._live.console.width if self._live else None

    def status(self, text: str) -> None:
        """Show what the program is doing on the last line of a terminal, until the bar replaces it."""
        if self._live:
            self._draw(printable(text))

    def begin(self, total: int, done: int, *, on_gpu: bool = False) -> None:
        """Show progress over `total` steps, of which `done` are from earlier starts; `on_gpu`: with GPU memory."""
        self._total, self._on_gpu, self._began = total, on_gpu, time.monotonic()
        self._losses.clear()
        self._draw_bar(done, {})

    def say(self, text: str) -> None:
        text = as_started(text)
        if self._live:
            from rich.text import Text

            self._live.console.print(Text(printable(text)), soft_wrap=True)
        elif self._enabled:
            self._stream.write(f"{printable(text)}\n")
            self._stream.flush()

    def step(self, values: Mapping[str, Any], seconds_left: float | None = None) -> None:
        if not self._live:
            self.say(step_line(values, self._total, seconds_left))
            return
        self._losses.append(values["loss"])
        shown = {
            **values,
            "loss": sum(self._losses) / len(self._losses),
            "gpu_memory_bytes": values.get("peak_memory_bytes") if self._on_gpu else None,
            "elapsed": time.monotonic() - self._began,
            "left": seconds_left,
        }
        self._draw_bar(values["step"], shown)

    def progress(self, completed: int, text: str) -> None:
        """Update the progress bar of a terminal."""
        self._draw_bar(completed, text)

    def close(self) -> None:
        """Remove the bar or status line and restore the cursor."""
        if self._live:
            self._live.stop()

    def _draw_bar(self, completed: int, numbers: Mapping[str, Any] | str) -> None:
        is_due = time.monotonic() - self._drawn >= _MIN_REDRAW_SECONDS or completed == self._total
        if self._live and is_due:
            self._drawn = time.monotonic()
            self._draw(_bar(completed, self._total or 0, numbers, self._live.console.width))

    def _draw(self, line: "RenderableType") -> None:
        assert self._live
        self._live.start()
        self._live.update(line, refresh=True)


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


def _live(stream: SafeStream) -> "Live":
    """Return a display of one line that is removed at the end."""
    from rich.live import Live

    return Live(console=rich_terminal(stream), auto_refresh=False, transient=True)


def _bar(completed: int, total: int, numbers: Mapping[str, Any] | str, width: int) -> "Table":
    """Return one line of `width` columns: position, bar, and as many numbers as fit next to a bar of minimum width."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    position = f"{completed:>{len(str(total))}}/{total}"
    room = width - len(position) - _MIN_BAR_WIDTH - 2  # two gaps
    text = truncate(printable(numbers), room) if isinstance(numbers, str) else bar_text(numbers, room)
    bar = ProgressBar(total, completed, width=_MIN_BAR_WIDTH + room - len(text))
    line = Table.grid(padding=(0, 1))
    line.add_row(position, bar, text)
    return line
