"""Rows that cannot be trained on: an error that shows several of them at once, or counted and left out."""

from app.data.report import Counts
from app.errors import DataError

_SHOWN = 5  # in one error


class BadRows:
    """Counts them; under `dataset.on_bad_row=error`, `stop_if_any` ends the reading."""

    def __init__(self, on_bad_row: str, counts: Counts) -> None:
        self._fatal = on_bad_row == "error"
        self._counts = counts

    def add(self, place: str, reason: str) -> None:
        """One bad row."""
        self._counts.bad(place, reason)

    def stop_if_any(self) -> None:
        """DataError with the first few, if they are an error."""
        if self._fatal and self._counts.bad_rows:
            raise DataError(bad_row_problems(self._counts))


def bad_row_problems(counts: Counts) -> list[str]:
    """Each reason once, since all rows may have the same one; none if no row is bad."""
    problems = [
        f"{counts.bad_first[reason]}{_more(rows - 1)}: {reason}"
        for reason, rows in list(counts.bad_by_reason.items())[:_SHOWN]
    ]
    if problems:
        problems[-1] += " (dataset.on_bad_row=skip leaves bad rows out)"
    return problems


def _more(rows: int) -> str:
    return f" and {rows:,} more row{'s' * (rows > 1)}" if rows else ""
