"""Lines of JSON that grow with the run and can be taken back to a step.

Numbers come back exactly as they were. JSON has no NaN and no infinity: they are written as null.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from app.files import append_text, fsync, report_write_errors, write_text


class StepLines:
    """A file of objects that each have a `step`: metrics.jsonl, samples.jsonl."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, values: Mapping[str, Any]) -> None:
        """One line, keys in the order given."""
        assert "step" in values
        finite = {key: finite_or_none(value) for key, value in values.items()}
        append_text(self.path, json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n")

    def fsync(self) -> None:
        """Force what was appended onto the disk, so that a power cut loses nothing."""
        if self.path.exists():
            with report_write_errors(self.path):
                fsync(self.path)

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Cut what came after `step` and what was torn; give what is left."""
        if not self.path.exists():
            return []
        with _open(self.path) as file:
            lines = list(file)
        kept = [(line, values) for line in lines if (values := _whole(line)) and values["step"] <= step]
        if len(kept) < len(lines):
            write_text(self.path, "".join(line for line, _ in kept))
        return [values for _, values in kept]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """What is whole of a file that may still be written to."""
    with _open(path) as file:
        for line in file:
            if values := _whole(line):
                yield values


def finite_or_none(value: Any) -> Any:
    """The value as JSON can have it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _open(path: Path) -> TextIO:
    return path.open(encoding="utf-8", errors="replace")


def _whole(line: str) -> dict[str, Any] | None:
    if not line.endswith("\n"):
        return None
    try:
        values = json.loads(line)
    except json.JSONDecodeError:
        return None
    return values if isinstance(values, dict) and isinstance(values.get("step"), int) else None
