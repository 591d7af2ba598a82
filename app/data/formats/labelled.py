"""Rows with a text, or two, and the class that they are of: a word, or a whole number."""

import re
from typing import Any

from app.config.schema import Columns
from app.data.formats.columns import text, value
from app.data.shapes import Example, Row, RowProblem, kind_of

_FRACTION = re.compile(r"[-+]?(\d+\.\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\d+[eE][-+]?\d+")
_LONGEST = 200  # characters of a name: what is longer is a text in the wrong column


def labelled_text(row: Row, columns: Columns) -> Example:
    """One text and its label."""
    return Example(_filled(row, columns.text), _label(row, columns.label))


def text_pair(row: Row, columns: Columns) -> Example:
    """Two texts and the label of how they go together."""
    return Example(
        _filled(row, columns.sentence1), _label(row, columns.label), _filled(row, columns.sentence2)
    )


def _filled(row: Row, column: str) -> str:
    found = text(row, column)
    if not found.strip():
        raise RowProblem(f"column {column!r} is empty")
    return found


def _label(row: Row, column: str) -> str:
    """The name of a class; files without types write numbers as text, so both are one name."""
    found: Any = value(row, column)
    if isinstance(found, bool | int):
        return str(found).lower()
    name = found.strip() if isinstance(found, str) else found
    if isinstance(name, float) or (isinstance(name, str) and _FRACTION.fullmatch(name)):
        raise RowProblem(
            f"column {column!r} is {name}, and a label is a word or a whole number: values between classes"
            " (regression) are not learnt here; name the classes, 'low' and 'high', or 4 in place of 4.0"
        )
    if isinstance(name, list):
        raise RowProblem(
            f"column {column!r} is a list, and a text has one label here: several at once are not learnt; make"
            " a column, and a run, of each"
        )
    if not isinstance(name, str) or not name:
        what = "empty" if name == "" else kind_of(name)
        raise RowProblem(f"column {column!r} must be a label, a word or a whole number, found {what}")
    if len(name) > _LONGEST:
        raise RowProblem(f"column {column!r} has {len(name):,} characters: that is a text, no label")
    return name
