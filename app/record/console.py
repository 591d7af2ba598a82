"""What is shown: a progress bar on a terminal, else lines. It is never a reason to stop a run."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TextIO

from app.record.lines import Sample, printable, samples_text, step_line


class Console(Protocol):
    """What a run shows."""

    def begin(self, total: int, done: int) -> None:
        """The run has `total` steps; `done` of them were made before."""

    def say(self, text: str) -> None:
        """One message."""

    def step(self, values: Mapping[str, Any], seconds_left: float | None = None) -> None:
        """The numbers of one step, and how long the rest takes."""

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """What the model answers by now."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class PlainConsole:
    """One line per step that is logged."""

    def __init__(self, stream: "SafeStream") -> None:
        self._stream = stream
        self._total: int | None = None

    def begin(self, total: int, done: int) -> None:  # noqa: ARG002  a line has no bar to move
        """From here on each line tells its place in the run."""
        self._total = total

    def say(self, text: str) -> None:
        """As it is."""
        self._stream.write(f"{printable(text)}\n")
        self._stream.flush()

    def step(self, values: Mapping[str, Any], seconds_left: float | None = None) -> None:
        """With the place in the run and the time left."""
        self.say(step_line(values, self._total, seconds_left))

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """One below the other."""
        self.say(samples_text(step, samples))

    def close(self) -> None:
        """Nothing to leave behind."""


class SafeStream:
    """A stream that falls silent where the real one breaks: a closed pipe, a closed terminal, a full disk."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._broken = False

    @property
    def encoding(self) -> str:
        """Of the real stream."""
        return self._stream.encoding or "utf-8"

    def write(self, text: str) -> int:
        """Characters that the encoding lacks become question marks."""
        if not self._broken:
            try:
                self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
            except (OSError, ValueError):
                self._fall_silent()
        return len(text)

    def flush(self) -> None:
        """Most breaks show here."""
        if not self._broken:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._fall_silent()

    def isatty(self) -> bool:
        """False for a closed stream."""
        try:
            return self._stream.isatty()
        except ValueError:
            return False

    def fileno(self) -> int:
        """Of the real stream."""
        return self._stream.fileno()

    def _fall_silent(self) -> None:
        self._broken = True
        # What is left in the buffer would fail once more when the interpreter ends, with exit code 120.
        with suppress(OSError, ValueError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self._stream.fileno())
            os.close(nothing)
