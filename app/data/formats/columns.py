"""Where a row has what: a column by its name, or a place inside one by a dotted path."""

from typing import Any

from app.data.shapes import Row, RowProblem, kind_of

ABSENT = object()


def value(row: Row, path: str) -> Any:
    """What stands at `path` (`output`, `instances.0.output`), or ABSENT. A column of just this name comes first."""
    if path in row:
        return row[path]
    place: Any = row
    for part in path.split("."):
        place = _inside(place, part)
        if place is ABSENT:
            break
    return place


def _inside(place: Any, part: str) -> Any:
    if isinstance(place, dict):
        return place.get(part, ABSENT)
    if isinstance(place, list) and part.isdecimal() and int(part) < len(place):
        return place[int(part)]
    return ABSENT


def has(row: Row, path: str) -> bool:
    """Whether anything stands there, null included."""
    return value(row, path) is not ABSENT


def text(row: Row, path: str) -> str:
    """What must be text."""
    found = value(row, path)
    if not isinstance(found, str):
        raise RowProblem(f"column {path!r} must be text, found {kind_of(found)}")
    return found


def optional(row: Row, path: str | None) -> Any:
    """What a row may have; None where it has nothing, or nobody wants it."""
    found = ABSENT if path is None else value(row, path)
    return None if found is ABSENT else found


def optional_text(row: Row, path: str | None) -> str:
    """Text that may be absent."""
    return "" if path is None or optional(row, path) is None else text(row, path)
