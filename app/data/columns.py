"""Columns of a row: by name, a place inside one by a dotted path, every element of a list by `*`, several texts by `+`;
what names mean.
"""

import json
import math
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from app.config.dataset_schema import Columns, DatasetConfig
from app.config.row_formats import LABELLED_FORMATS, ROW_FORMATS, TAGGED_FORMATS
from app.data.data_file import DataFile
from app.data.roles import CHOICE, ROLES, has_role, is_prose
from app.data.types import Broken, Located, Row, RowProblem, kind_of

ABSENT = object()
EVERY_ELEMENT = ".*"
JOIN = "+"
_LETTERS = [*ascii_uppercase]  # of choices without labels
_PLAIN_VALUE = re.compile(r"[\w.*+/: -]+")
_LABELLED_CHOICE = re.compile(r"\s*\(?\w{1,2}\s?[).:]")
_SOURCE = ("path", "split", "hub_config", "revision")


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
        labelled = all(_LABELLED_CHOICE.match(text) for _, text in choices)
        return "\n".join(text if labelled else f"{label}. {text}" for label, text in choices)
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


def is_number(found: Any) -> bool:
    """Return whether it is a finite number."""
    return isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)


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
    skipped = [*(config.leave_out if config else ()), *leave_out]
    last = [shlex.quote(f"dataset.leave_out=[{','.join(skipped)}]")] if skipped else []
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


def is_talk(found: Any) -> bool:
    """Return whether it is a list of messages or turns."""
    first = found[0] if isinstance(found, list) and found else None
    return isinstance(first, dict) and ("role" in first or "from" in first)


def json_file(config: DatasetConfig | None) -> DataFile:
    """Return the file of JSON rows that a section reads; OLD.jsonl where it reads other rows."""
    named = (config.path if config else None) or ""
    path = Path(named if named.endswith((".jsonl", ".ndjson", ".json")) else "OLD.jsonl")
    return DataFile(path, path.name)
