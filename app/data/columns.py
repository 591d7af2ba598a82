"""Where a row has what: a column by its name, a place inside one by a dotted path, every element of a list by `*`."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from app.config.schema import Columns
from app.data.types import Broken, Located, Row, RowProblem, kind_of

ABSENT = object()
_EACH = ".*"


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


def unfolded(rows: Iterator[Located], columns: Columns, names: tuple[str, ...]) -> Iterator[Located]:
    """Every row once for each element of the list that the columns called `names` go through; else as it is."""
    lists = {path.partition(_EACH)[0] for path in _paths(columns, names) if _EACH in path}
    if not lists:
        return rows
    (held,) = lists  # config.rules lets no second one pass
    return (part for place, row in rows for part in _parts(place, row, held))


def _paths(columns: Columns, names: tuple[str, ...]) -> Iterator[str]:
    for field in fields(Columns):
        path = getattr(columns, field.name)
        if field.name in names and path is not None:
            yield path


def _parts(place: str, row: Row | Broken, held: str) -> Iterator[Located]:
    if isinstance(row, Broken):
        yield place, row
        return
    found = value(row, held)
    if not isinstance(found, list) or not found:
        kind = "an empty list" if found == [] else "nothing" if found is ABSENT else kind_of(found)
        yield (
            place,
            Broken(f"column {held!r} must be a list, because dataset.columns has {held}.*; found {kind}"),
        )
        return
    path = [held] if held in row else held.split(".")
    for index, element in enumerate(found):
        yield f"{place} {held}[{index}]", _with(row, path, {"*": element})


def _with(row: Any, path: list[str], element: dict[str, Any]) -> Any:
    """A copy of the row with one element where the list was."""
    if not path:
        return element
    first, *rest = path
    if isinstance(row, list):
        at = int(first)
        return [*row[:at], _with(row[at], rest, element), *row[at + 1 :]]
    return {**row, first: _with(row[first], rest, element)}
