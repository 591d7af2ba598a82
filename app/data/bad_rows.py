"""Rows that cannot be trained on: an error that shows several of them at once, or counted and left out."""

from app.data.report import Counts
from app.errors import DataError

_SHOWN = 5  # in one error


class BadRows:
    """Counts them; under `dataset.on_bad_row=error`, `stop_if_any` ends the reading."""

    def __init__(self, on_bad_row: str, counts: Counts) -> None:
        self._fatal = on_bad_row == "error"
        self._counts = counts
        self._found: dict[str, list[str]] = {}  # places by reason, since the whole file may have the same one

    def add(self, place: str, reason: str) -> None:
        """One bad row."""
        self._counts.bad(place, reason)
        if self._fatal:
            self._found.setdefault(reason, []).append(place)

    def stop_if_any(self) -> None:
        """DataError with the first few, if they are an error."""
        if not self._found:
            return
        problems = [_problem(reason, places) for reason, places in list(self._found.items())[:_SHOWN]]
        problems[-1] += " (dataset.on_bad_row=skip leaves bad rows out)"
        raise DataError(problems)


def _problem(reason: str, places: list[str]) -> str:
    more = f" and {len(places) - 1} more rows" if len(places) > 1 else ""
    return f"{places[0]}{more}: {reason}"
