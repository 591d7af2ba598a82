"""Columns of rows: by name, nested values by a dotted path, list elements by `*`, several texts by `+`."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from string import ascii_uppercase
from typing import Any

from app.config.schema import Columns, DatasetConfig
from app.data.advised_commands import command
from app.data.roles import CHOICE, NUMERIC_ANSWERS, ROLES, has_role, is_number, is_prose, is_talk
from app.data.rows import Broken, Located, Row, RowProblem, kind_of
from app.data.transform import transform_of

ABSENT = object()
EVERY_ELEMENT = ".*"
JOIN = "+"
_LETTERS = [*ascii_uppercase]  # for choices without labels
MIN_SHARE = 0.9  # of the first rows; bad rows are reported when they are read
Kind = Callable[[Any], bool]  # check of a column value
_LABELED_CHOICE = re.compile(r"\s*\(?\w{1,2}\s?[).:]")


def value(row: Row, path: str) -> Any:
    """Return the value at `path` (`output`, `instances.0.output`, `question+context`), or ABSENT.

    A column with exactly this name has priority.
    """
    if path in row:
        return row[path]
    if JOIN in path:
        return _joined(row, path.split(JOIN))
    inner: Any = row
    for part in path.split("."):
        if isinstance(inner, dict):
            inner = inner.get(part, ABSENT)
        elif isinstance(inner, list) and part.isdecimal() and int(part) < len(inner):
            inner = inner[int(part)]
        else:
            return ABSENT
    return inner


def _joined(row: Row, names: Sequence[str]) -> Any:
    """Join texts of several columns with blank lines, choices with line breaks; return other values unchanged.

    Prompt and answer columns are required, others may be absent.
    """
    whole, was_choice = "", False
    has_cell = False
    for name in names:
        cell = value(row, name)
        if cell is ABSENT or cell is None:
            if has_role(name, "asks", "answers") and not has_role(name, "context"):
                return cell
            continue
        has_cell, text = True, as_text(cell, name)
        if text is None:
            return cell
        is_choice = bool(CHOICE.fullmatch(name))
        label = f"{name[-1].upper()}. " if is_choice else ""
        if text.strip():
            between = "\n" if is_choice and was_choice else "\n\n"
            whole, was_choice = whole + between * bool(whole) + label + text, is_choice
    return whole if has_cell else ABSENT


def as_text(cell: Any, name: str = "") -> str | None:
    """Return a text, a list of texts or choices as one text, schemas as JSON; None for other values."""
    if isinstance(cell, str):
        return cell
    choices = choices_of(cell) if has_role(name, "choices") else []
    if choices:
        labeled = all(_LABELED_CHOICE.match(text) for _, text in choices)
        return "\n".join(text if labeled else f"{label}. {text}" for label, text in choices)
    if isinstance(cell, list) and cell and all(isinstance(element, str) for element in cell):
        return "\n".join(cell)
    if isinstance(cell, dict | list) and cell and has_role(name, "context") and not is_talk(cell):
        return json.dumps(cell, ensure_ascii=False, default=str)
    return None


def choices_of(cell: Any) -> list[tuple[str, str]]:
    """Return the choices of a question with their labels; empty if there are none."""
    labels: Any = _LETTERS
    texts = cell
    if isinstance(cell, dict):
        labels, texts = cell.get("label", labels), cell.get("text")
        if not isinstance(texts, list) and all(len(str(key)) == 1 for key in cell):
            labels, texts = [*cell], [*cell.values()]
    elif isinstance(cell, list) and all(isinstance(choice, dict) for choice in cell):
        labels = [choice.get("label") or letter for choice, letter in zip(cell, labels, strict=False)]
        texts = [choice.get("text") for choice in cell]
    is_list = isinstance(texts, list) and isinstance(labels, list) and 2 <= len(texts) <= len(labels)
    if not is_list or not all(isinstance(text, str) for text in texts):
        return []
    return [(str(label), text) for label, text in zip(labels, texts, strict=False)]


def thought_column(row: Row, columns: Columns) -> str | None:
    """Return the reasoning column: the configured one, or one with a reasoning name and prose."""
    if columns.reasoning != "reasoning":
        return columns.reasoning
    names = (name for name, inner in row.items() if has_role(str(name), "reasoning") and is_prose(inner))
    return next(names, None)


def has(row: Row, path: str) -> bool:
    """Return whether the row has a value at the path, null included."""
    return value(row, path) is not ABSENT


def unread(row: Row, paths: Collection[str]) -> Iterator[str]:
    """Yield the names of values that none of the paths reads."""
    for name, cell in row.items():
        if name in paths or cell is None:  # tables store absent columns as null
            continue
        inner = [path.partition(".")[2] for path in paths if path.startswith(f"{name}.")]
        parts = {str(at): element for at, element in enumerate(cell)} if isinstance(cell, list) else cell
        if not inner:
            yield str(name)
        elif isinstance(parts, dict):
            yield from (f"{name}.{part}" for part in unread(parts, inner))


def text(row: Row, path: str) -> str:
    """Return the text of a column; RowProblem if it is not text."""
    cell = value(row, path)
    if not isinstance(cell, str):
        raise RowProblem(f"column {path!r} must be text, found {kind_of(cell)}")
    return cell


def answer_text(row: Row, path: str) -> str:
    """Return the text of an answer column, which may be a number."""
    cell = value(row, path)
    return str(cell) if is_number(cell) else text(row, path)


def optional(row: Row, path: str | None) -> Any:
    """Return the value of an optional column; None if it is absent or not configured."""
    cell = ABSENT if path is None else value(row, path)
    return None if cell is ABSENT else cell


def optional_text(row: Row, path: str | None) -> str:
    """Return the text of an optional column, which may be a list of texts or choices."""
    cell = optional(row, path)
    if path is None or cell is None:
        return ""
    joined = as_text(cell, path)
    return text(row, path) if joined is None else joined


def reshape_rows(
    rows: Iterator[Located],
    config: DatasetConfig,
    names: Collection[str],
    count_dropped: Callable[[], None] = lambda: None,
) -> Iterator[Located]:
    """Yield rows as `dataset.transform` returns them, without the columns of `dataset.leave_out`.

    If a field in `names` of `dataset.columns` has a path with `*`, yield the row once per element of that list.
    """
    if transform := transform_of(config):
        rows = transform.rows(rows, count_dropped)
    if config.leave_out:
        left_out = config.leave_out
        rows = (
            (location, row if isinstance(row, Broken) else {k: cell for k, cell in row.items() if k not in left_out})
            for location, row in rows
        )
    configured = [path for name in names if (path := getattr(config.columns, name)) is not None]
    paths = [part for path in configured for part in path.split(JOIN) if EVERY_ELEMENT in part]
    if not paths:
        return rows
    (column,) = {path.partition(EVERY_ELEMENT)[0] for path in paths}  # config.rules allows only one
    return (part for location, row in rows for part in _elements(location, row, column))


def _elements(location: str, row: Row | Broken, column: str) -> Iterator[Located]:
    if isinstance(row, Broken):
        yield location, row
        return
    cell = value(row, column)
    if not isinstance(cell, list) or not cell:
        kind = "an empty list" if cell == [] else "nothing" if cell is ABSENT else kind_of(cell)
        problem = f"column {column!r} must be a list, because dataset.columns has {column}.*; found {kind}"
        yield location, Broken(problem)
        return
    path = [column] if column in row else column.split(".")
    for index, element in enumerate(cell):
        yield f"{location} {column}[{index}]", _with(row, path, {"*": element})


def _with(row: Any, path: list[str], element: dict[str, Any]) -> Any:
    """Return a copy of the row with one element in place of the list."""
    if not path:
        return element
    first, *rest = path
    if isinstance(row, list):
        at = int(first)
        return [*row[:at], _with(row[at], rest, element), *row[at + 1 :]]
    return {**row, first: _with(row[first], rest, element)}


@dataclass(frozen=True)
class FirstRows:
    """First rows of a source, their column names, and the columns that most rows have."""

    rows: Sequence[Row]
    section: DatasetConfig
    key: str  # of the section
    formats: Sequence[str]  # candidates

    @cached_property
    def names(self) -> list[str]:
        """Column names of all rows."""
        return list(dict.fromkeys(str(name) for row in self.rows for name in row))

    @cached_property
    def texts(self) -> list[str]:
        """Paths of texts in most rows: columns, object values, and elements of the first list of texts."""
        paths = dict.fromkeys(path for row in self.rows for path in _text_paths(row))
        most = [path for path in paths if self.most(path, text_kind(path))]
        starred = [path for path in most if EVERY_ELEMENT in path]
        of_list = [path.partition(EVERY_ELEMENT)[0] for path in starred]
        return [path for path in most if path not in starred or path.partition(EVERY_ELEMENT)[0] == of_list[0]]

    def number(self, kinds: Mapping[str, Kind]) -> int:
        """Return the number of rows whose values at all paths pass their checks."""
        return sum(all(all(map(kind, _values(row, path))) for path, kind in kinds.items()) for row in self.rows)

    def most(self, path: str, kind: Kind) -> bool:
        """Return whether the value at the path passes the check in most rows."""
        return self.is_most(self.number({path: kind}))

    def is_most(self, number: int) -> bool:
        """Return whether the number is at least `MIN_SHARE` of the rows."""
        return number >= MIN_SHARE * len(self.rows)

    def in_role(self, role: str, kind: Kind) -> str:
        """Return the first column name of a role whose values pass the check in most rows; empty if there is none."""
        return next((name for name in ROLES[role] if self.most(name, kind)), "")

    def is_prose(self, path: str) -> bool:
        """Return whether most rows have text of several words at the path; for a list, in its first element."""
        first = path.replace(EVERY_ELEMENT, ".0")
        return 2 * sum(is_prose(str(value(row, first))) for row in self.rows) > len(self.rows)

    def command(self, fmt: str, columns: Mapping[str, str], leave_out: Sequence[str] = ()) -> str:
        """Return the command that checks the rows with a format."""
        return command(fmt, columns, self.section, self.key, leave_out)


def _values(row: Row, path: str) -> list[Any]:
    """Return the values at a path; one per list element if the path has `*`."""
    cell = value(row, path)
    if cell is not ABSENT or EVERY_ELEMENT not in path:
        return [cell]
    head, _, inner = path.partition(EVERY_ELEMENT)
    parts = value(row, head)
    return [value({"*": part}, f"*{inner}") for part in parts] if isinstance(parts, list) and parts else [ABSENT]


def is_there(cell: Any) -> bool:
    """Return whether the value is present and not null."""
    return cell is not ABSENT and cell is not None


def is_text(cell: Any) -> bool:
    """Return whether the value is text."""
    return isinstance(cell, str)


def text_kind(path: str) -> Kind:
    """Return the check for text; in an answer column, numbers pass too and are read as text."""
    return (lambda cell: is_text(cell) or is_number(cell)) if path.rpartition(".")[2] in NUMERIC_ANSWERS else is_text


def _text_paths(row: Row) -> Iterator[str]:
    for name, cell in row.items():
        if has_role(name, "about"):
            continue
        first = cell[0] if isinstance(cell, list) and cell else None
        if text_kind(name)(cell):
            yield name
        elif isinstance(cell, dict) and "*" not in cell:  # "*" is a list element, as the section reads it
            yield from (f"{name}.{key}" for key, inner in cell.items() if isinstance(inner, str))
        elif isinstance(first, str):
            yield f"{name}{EVERY_ELEMENT}"
        # a boolean may mark elements that are not trained
        elif isinstance(first, dict) and not any(isinstance(inner, bool) for inner in first.values()):
            yield from (f"{name}{EVERY_ELEMENT}.{key}" for key, inner in first.items() if isinstance(inner, str))
