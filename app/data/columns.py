"""Columns of rows: by name, a place inside by a dotted path, each element of a list by `*`, several texts by `+`."""

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
    found: Any = row
    for part in path.split("."):
        if isinstance(found, dict):
            found = found.get(part, ABSENT)
        elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            return ABSENT
    return found


def _joined(row: Row, names: Sequence[str]) -> Any:
    """Join the texts of several columns with blank lines, choices with line breaks; return a value that is not text.

    Prompt and answer columns are required, others may be absent.
    """
    whole, was_choice = "", False
    found_any = False
    for name in names:
        found = value(row, name)
        if found is ABSENT or found is None:
            if has_role(name, "asks", "answers") and not has_role(name, "context"):
                return found
            continue
        found_any, text = True, as_text(found, name)
        if text is None:
            return found
        is_choice = bool(CHOICE.fullmatch(name))
        label = f"{name[-1].upper()}. " if is_choice else ""
        if text.strip():
            between = "\n" if is_choice and was_choice else "\n\n"
            whole, was_choice = whole + between * bool(whole) + label + text, is_choice
    return whole if found_any else ABSENT


def as_text(found: Any, name: str = "") -> str | None:
    """Return a text, a list of texts or choices as one text, schemas as JSON; None for other values."""
    if isinstance(found, str):
        return found
    choices = choices_of(found) if has_role(name, "choices") else []
    if choices:
        labeled = all(_LABELED_CHOICE.match(text) for _, text in choices)
        return "\n".join(text if labeled else f"{label}. {text}" for label, text in choices)
    if isinstance(found, list) and found and all(isinstance(each, str) for each in found):
        return "\n".join(found)
    if isinstance(found, dict | list) and found and has_role(name, "context") and not is_talk(found):
        return json.dumps(found, ensure_ascii=False, default=str)
    return None


def choices_of(found: Any) -> list[tuple[str, str]]:
    """Return the choices of a question with their labels; empty if there are none."""
    labels: Any = _LETTERS
    texts = found
    if isinstance(found, dict):
        labels, texts = found.get("label", labels), found.get("text")
        if not isinstance(texts, list) and all(len(str(key)) == 1 for key in found):
            labels, texts = [*found], [*found.values()]
    elif isinstance(found, list) and all(isinstance(each, dict) for each in found):
        labels = [each.get("label") or letter for each, letter in zip(found, labels, strict=False)]
        texts = [each.get("text") for each in found]
    is_list = isinstance(texts, list) and isinstance(labels, list) and 2 <= len(texts) <= len(labels)
    if not is_list or not all(isinstance(text, str) for text in texts):
        return []
    return [(str(label), text) for label, text in zip(labels, texts, strict=False)]


def thought_column(row: Row, columns: Columns) -> str | None:
    """Return the reasoning column: the configured one, or one with a reasoning name and prose."""
    if columns.reasoning != "reasoning":
        return columns.reasoning
    found = (name for name, inner in row.items() if has_role(str(name), "reasoning") and is_prose(inner))
    return next(found, None)


def has(row: Row, path: str) -> bool:
    """Return whether the row has a value at the path, null included."""
    return value(row, path) is not ABSENT


def unread(row: Row, paths: Collection[str]) -> Iterator[str]:
    """Yield the names of values that none of the paths reads."""
    for name, found in row.items():
        if name in paths or found is None:  # tables store absent columns as null
            continue
        inner = [path.partition(".")[2] for path in paths if path.startswith(f"{name}.")]
        parts = {str(at): each for at, each in enumerate(found)} if isinstance(found, list) else found
        if not inner:
            yield str(name)
        elif isinstance(parts, dict):
            yield from (f"{name}.{each}" for each in unread(parts, inner))


def text(row: Row, path: str) -> str:
    """Return the text of a column; RowProblem if it is not text."""
    found = value(row, path)
    if not isinstance(found, str):
        raise RowProblem(f"column {path!r} must be text, found {kind_of(found)}")
    return found


def answer_text(row: Row, path: str) -> str:
    """Return the text of an answer column, which may be a number."""
    found = value(row, path)
    return str(found) if is_number(found) else text(row, path)


def optional(row: Row, path: str | None) -> Any:
    """Return the value of an optional column; None if it is absent or not configured."""
    found = ABSENT if path is None else value(row, path)
    return None if found is ABSENT else found


def optional_text(row: Row, path: str | None) -> str:
    """Return the text of an optional column, which may be a list of texts or choices."""
    found = optional(row, path)
    if path is None or found is None:
        return ""
    joined = as_text(found, path)
    return text(row, path) if joined is None else joined


def reshape_rows(rows: Iterator[Located], config: DatasetConfig, names: Collection[str]) -> Iterator[Located]:
    """Yield rows without the columns of `dataset.leave_out`.

    If a field in `names` of `dataset.columns` has a path with `*`, yield the row once per element of that list.
    """
    if config.leave_out:
        without = config.leave_out
        rows = (
            (location, row if isinstance(row, Broken) else {k: found for k, found in row.items() if k not in without})
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
    found = value(row, column)
    if not isinstance(found, list) or not found:
        kind = "an empty list" if found == [] else "nothing" if found is ABSENT else kind_of(found)
        problem = f"column {column!r} must be a list, because dataset.columns has {column}.*; found {kind}"
        yield location, Broken(problem)
        return
    path = [column] if column in row else column.split(".")
    for index, element in enumerate(found):
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
        """Return whether this number of rows is most of them."""
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
    found = value(row, path)
    if found is not ABSENT or EVERY_ELEMENT not in path:
        return [found]
    head, _, inner = path.partition(EVERY_ELEMENT)
    parts = value(row, head)
    return [value({"*": each}, f"*{inner}") for each in parts] if isinstance(parts, list) and parts else [ABSENT]


def is_there(found: Any) -> bool:
    """Return whether the value is present and not null."""
    return found is not ABSENT and found is not None


def is_text(found: Any) -> bool:
    """Return whether the value is text."""
    return isinstance(found, str)


def text_kind(path: str) -> Kind:
    """Return the check for text, or for a numeric answer, which is read as text."""
    return (lambda found: is_text(found) or is_number(found)) if path.rpartition(".")[2] in NUMERIC_ANSWERS else is_text


def _text_paths(row: Row) -> Iterator[str]:
    for name, found in row.items():
        if has_role(name, "about"):
            continue
        first = found[0] if isinstance(found, list) and found else None
        if text_kind(name)(found):
            yield name
        elif isinstance(found, dict) and "*" not in found:  # "*" is a list element, as the section reads it
            yield from (f"{name}.{key}" for key, inner in found.items() if isinstance(inner, str))
        elif isinstance(first, str):
            yield f"{name}{EVERY_ELEMENT}"
        # a boolean may mark elements that are not trained
        elif isinstance(first, dict) and not any(isinstance(inner, bool) for inner in first.values()):
            yield from (f"{name}{EVERY_ELEMENT}.{key}" for key, inner in first.items() if isinstance(inner, str))
