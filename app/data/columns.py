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
_LETTERS = [*ascii_uppercase]  # of choices without labels
MIN_SHARE = 0.9  # of the first rows; a bad row is reported when it is read
Kind = Callable[[Any], bool]  # of what a column holds
_LABELED_CHOICE = re.compile(r"\s*\(?\w{1,2}\s?[).:]")


def value(row: Row, path: str) -> Any:
    """Look up `path` (`output`, `instances.0.output`, `question+context`), or ABSENT.

    A column of just this name comes first.
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
    """Join the texts of several columns by blank lines, choices by line breaks; or what of them is no text.

    A column that asks or answers must be there, others may be absent.
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
    """Return a text, a list of texts or the choices of a question as one text, schemas as JSON; None for others."""
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
    """Return the choices of a question with their labels; empty if it holds none."""
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
    """Return the column with what was thought before the answer: as configured, or any of its names with prose."""
    if columns.reasoning != "reasoning":
        return columns.reasoning
    found = (name for name, inner in row.items() if has_role(str(name), "reasoning") and is_prose(inner))
    return next(found, None)


def has(row: Row, path: str) -> bool:
    """Whether the row has it, null included."""
    return value(row, path) is not ABSENT


def unread(row: Row, paths: Collection[str]) -> Iterator[str]:
    """Names of what the row holds and none of the paths reads."""
    for name, found in row.items():
        if name in paths or found is None:  # tables fill absent columns with null
            continue
        inner = [path.partition(".")[2] for path in paths if path.startswith(f"{name}.")]
        parts = {str(at): each for at, each in enumerate(found)} if isinstance(found, list) else found
        if not inner:
            yield str(name)
        elif isinstance(parts, dict):
            yield from (f"{name}.{each}" for each in unread(parts, inner))


def text(row: Row, path: str) -> str:
    """The text of a column that must be text."""
    found = value(row, path)
    if not isinstance(found, str):
        raise RowProblem(f"column {path!r} must be text, found {kind_of(found)}")
    return found


def answer_text(row: Row, path: str) -> str:
    """Return the text of a column with an answer, which may be a number."""
    found = value(row, path)
    return str(found) if is_number(found) else text(row, path)


def optional(row: Row, path: str | None) -> Any:
    """The value of a column that may be absent; None where it is, or where no column is named."""
    found = ABSENT if path is None else value(row, path)
    return None if found is ABSENT else found


def optional_text(row: Row, path: str | None) -> str:
    """Return the text of a column that may be absent, a list of texts or choices."""
    found = optional(row, path)
    if path is None or found is None:
        return ""
    joined = as_text(found, path)
    return text(row, path) if joined is None else joined


def wanted_rows(rows: Iterator[Located], config: DatasetConfig, names: Collection[str]) -> Iterator[Located]:
    """Rows without the columns of `dataset.leave_out`.

    Each is repeated for every element of the list that the fields `names` of `dataset.columns` go through, if any do.
    """
    if config.leave_out:
        without = config.leave_out
        rows = (
            (location, row if isinstance(row, Broken) else {k: found for k, found in row.items() if k not in without})
            for location, row in rows
        )
    given = [path for name in names if (path := getattr(config.columns, name)) is not None]
    paths = [part for path in given for part in path.split(JOIN) if EVERY_ELEMENT in part]
    if not paths:
        return rows
    (column,) = {path.partition(EVERY_ELEMENT)[0] for path in paths}  # config.rules lets no second one pass
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
    """A copy of the row with one element where the list was."""
    if not path:
        return element
    first, *rest = path
    if isinstance(row, list):
        at = int(first)
        return [*row[:at], _with(row[at], rest, element), *row[at + 1 :]]
    return {**row, first: _with(row[first], rest, element)}


@dataclass(frozen=True)
class FirstRows:
    """The first rows of a source: the names of their columns, and which of them most rows hold something in."""

    rows: Sequence[Row]
    section: DatasetConfig
    key: str  # of the section
    formats: Sequence[str]  # to choose from

    @cached_property
    def names(self) -> list[str]:
        """The columns of all rows."""
        return list(dict.fromkeys(str(name) for row in self.rows for name in row))

    @cached_property
    def texts(self) -> list[str]:
        """The paths of texts in most rows: in a column, in an object, in every element of the first list of texts."""
        paths = dict.fromkeys(path for row in self.rows for path in _text_paths(row))
        most = [path for path in paths if self.most(path, text_kind(path))]
        starred = [path for path in most if EVERY_ELEMENT in path]
        of_list = [path.partition(EVERY_ELEMENT)[0] for path in starred]
        return [path for path in most if path not in starred or path.partition(EVERY_ELEMENT)[0] == of_list[0]]

    def number(self, kinds: Mapping[str, Kind]) -> int:
        """Return how many rows hold what is of its kind at each of the paths."""
        return sum(all(all(map(kind, _values(row, path))) for path, kind in kinds.items()) for row in self.rows)

    def most(self, path: str, kind: Kind) -> bool:
        """Return whether most rows hold what is of the kind there."""
        return self.is_most(self.number({path: kind}))

    def is_most(self, number: int) -> bool:
        """Return whether it is the number of most rows."""
        return number >= MIN_SHARE * len(self.rows)

    def in_role(self, role: str, kind: Kind) -> str:
        """Return the clearest name of a role under which most rows hold what is of the kind; empty for none."""
        return next((name for name in ROLES[role] if self.most(name, kind)), "")

    def is_prose(self, path: str) -> bool:
        """Return whether most rows hold text of several words there, in a list in its first element."""
        first = path.replace(EVERY_ELEMENT, ".0")
        return 2 * sum(is_prose(str(value(row, first))) for row in self.rows) > len(self.rows)

    def command(self, fmt: str, columns: Mapping[str, str], leave_out: Sequence[str] = ()) -> str:
        """Return the command that checks the rows by a format."""
        return command(fmt, columns, self.section, self.key, leave_out)


def _values(row: Row, path: str) -> list[Any]:
    """Return what is at a path; of every element of a list where the path goes through one."""
    found = value(row, path)
    if found is not ABSENT or EVERY_ELEMENT not in path:
        return [found]
    head, _, inner = path.partition(EVERY_ELEMENT)
    parts = value(row, head)
    return [value({"*": each}, f"*{inner}") for each in parts] if isinstance(parts, list) and parts else [ABSENT]


def is_there(found: Any) -> bool:
    """Return whether a row has something, not null."""
    return found is not ABSENT and found is not None


def is_text(found: Any) -> bool:
    """Return whether it is text."""
    return isinstance(found, str)


def text_kind(path: str) -> Kind:
    """Return the kind of a text there, or of a number that answers, which is read as text."""
    return (lambda found: is_text(found) or is_number(found)) if path.rpartition(".")[2] in NUMERIC_ANSWERS else is_text


def _text_paths(row: Row) -> Iterator[str]:
    for name, found in row.items():
        if has_role(name, "about"):
            continue
        first = found[0] if isinstance(found, list) and found else None
        if text_kind(name)(found):
            yield name
        elif isinstance(found, dict) and "*" not in found:  # which is an element of a list, as the section reads it
            yield from (f"{name}.{key}" for key, inner in found.items() if isinstance(inner, str))
        elif isinstance(first, str):
            yield f"{name}{EVERY_ELEMENT}"
        # true or false says that some elements are not to be learnt
        elif isinstance(first, dict) and not any(isinstance(inner, bool) for inner in first.values()):
            yield from (f"{name}{EVERY_ELEMENT}.{key}" for key, inner in first.items() if isinstance(inner, str))
