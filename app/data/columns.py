"""Columns of a row: by name, a place inside one by a dotted path, every element of a list by `*`; what names mean."""

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from app.config.dataset_schema import DatasetConfig
from app.config.row_formats import LABELLED_FORMATS, ROW_FORMATS, TAGGED_FORMATS
from app.data.roles import ROLES
from app.data.types import Broken, Located, Row, RowProblem, kind_of

ABSENT = object()
EVERY_ELEMENT = ".*"
_PLAIN_VALUE = re.compile(r"[\w.*/: -]+")
_SOURCE = ("path", "split", "hub_config", "revision")


def value(row: Row, path: str) -> Any:
    """Look up `path` (`output`, `instances.0.output`), or ABSENT. A column of just this name comes first."""
    if path in row:
        return row[path]
    found: Any = row
    for part in path.split("."):
        if isinstance(found, dict):
            found = found.get(part, ABSENT)
        elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            return ABSENT
    return found


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


def optional(row: Row, path: str | None) -> Any:
    """The value of a column that may be absent; None where it is, or where no column is named."""
    found = ABSENT if path is None else value(row, path)
    return None if found is ABSENT else found


def optional_text(row: Row, path: str | None) -> str:
    """The text of a column that may be absent."""
    return "" if path is None or optional(row, path) is None else text(row, path)


def typed(key: str, fmt: str, columns: Mapping[str, str]) -> str:
    """The words to type that choose a format and its columns in the section `key`."""
    return " ".join([f"{key}.format={fmt}", *_settings(key, _renamed(columns))])


def command(
    fmt: str,
    columns: Mapping[str, str],
    config: DatasetConfig | None,
    key: str = "dataset",
    leave_out: Sequence[str] = (),
) -> str:
    """The command line that checks the rows of `config` as `fmt`; of a source of a mix, only its own words."""
    unwanted = [*(config.leave_out if config else ()), *leave_out]
    last = [shlex.quote(f"dataset.leave_out=[{','.join(unwanted)}]")] if unwanted else []
    if key != "dataset" or (config and config.mix):
        return " ".join([typed(key, fmt, columns), *last])
    given = {name: getattr(config, name) for name in _SOURCE} if config else {"path": "FILE"}
    source = {name: found for name, found in given.items() if found not in (None, "train")}
    task = ["task=classification"] if fmt in LABELLED_FORMATS else []
    task += ["task=tokens"] if fmt in TAGGED_FORMATS else []
    task += ROW_FORMATS[fmt].learnt_by[:1] if fmt in ROW_FORMATS else ()
    words = [*task, f"dataset={fmt}", *_settings(key, {**source, **_renamed(columns)}), *last]
    return " ".join(["python -m app.check data", *words])


def _renamed(columns: Mapping[str, str]) -> dict[str, str]:
    return {f"columns.{name}": path for name, path in columns.items() if path != name}


def _settings(key: str, values: Mapping[str, str]) -> Iterator[str]:
    for name, given in values.items():
        shown = given if _PLAIN_VALUE.fullmatch(given) else "'" + given.replace("'", "\\'") + "'"
        yield shlex.quote(f"{key}.{name}={shown}")


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
    given = (getattr(config.columns, name) for name in names)
    paths = [path for path in given if path is not None and EVERY_ELEMENT in path]
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


def named_like(words: Sequence[str], paths: Sequence[str]) -> str:
    """The first column path that has one of `words` as its last part or suffix; empty if none has."""
    for word in words:
        for path in paths:
            last = path.removesuffix(".*").rpartition(".")[2]
            if last == word or re.split(r"[\W_]+", last)[-1] == word:
                return path
    return ""


def pair_format(asks: str, answers: str, others: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The format of a question and its answer that reads context, history and system among the `others`, and its
    columns; no format where two inputs need one place.
    """
    inputs = [path for path in others if named_like(ROLES["context"], [path])]
    if len(inputs) > 1:
        return "", {}
    more = "".join(inputs)
    history, system = (named_like(ROLES[role], others) for role in ("history", "system"))
    fmt, fields = "question_answer", ("question", "answer")
    if more or history:
        fmt, fields = "instruction", ("instruction", "output")
    chosen = {fields[0]: asks, fields[1]: answers, "input": more, "history": history, "system": system}
    return fmt, {name: path for name, path in chosen.items() if path}


def is_history(found: Any) -> bool:
    """Whether it holds earlier turns, `[[question, answer], ...]`."""
    turns = found if isinstance(found, list) else []
    return bool(turns) and all(isinstance(each, list) and [*map(type, each)] == [str, str] for each in turns)
