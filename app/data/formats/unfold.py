"""Rows that hold several: a `*` in a column's path stands for every element of a list, and each makes a row."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from app.config.schema import Columns
from app.data.formats.columns import ABSENT, value
from app.data.shapes import Broken, Located, Row, kind_of

_EACH = ".*"


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
