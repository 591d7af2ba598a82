"""Append-only JSON lines of a run (metrics.jsonl, samples.jsonl), which a resume truncates after its step.

Numbers are read back exactly. JSON has no NaN and no infinity: they are written as null.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from app.files import append_text, fsync, report_write_errors, write_text


class StepLog:
    """A file of JSON objects that each have a `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, values: Mapping[str, Any]) -> None:
        """Append a line, with the keys in the given order."""
        assert "step" in values
        finite = {key: finite_or_none(value) for key, value in values.items()}
        append_text(self.path, json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n")

    def fsync(self) -> None:
        """Force what was appended onto the disk, so that a power cut loses nothing."""
        if self.path.exists():
            with report_write_errors(self.path):
                fsync(self.path)

    def truncate_after(self, step: int) -> list[dict[str, Any]]:
        """Remove lines after `step` and torn lines; returns the others."""
        if not self.path.exists():
            return []
        with self.path.open(encoding="utf-8", errors="replace") as file:
            lines = list(file)
        remaining = [(line, values) for line in lines if (values := _parse(line)) and values["step"] <= step]
        if len(remaining) < len(lines):
            write_text(self.path, "".join(line for line, _ in remaining))
        return [values for _, values in remaining]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a file that may still be written to."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if values := _parse(line):
                yield values


def finite_or_none(value: Any) -> Any:
    """The value, or None for NaN and infinity, which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse(line: str) -> dict[str, Any] | None:
    if not line.endswith("\n"):
        return None
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and isinstance(values.get("step"), int) else None
