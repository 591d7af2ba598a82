"""Files to rows, each with its place. Not through `datasets`, which forgets the line of a row."""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from app.data.decoding import LOOK, not_utf8, nul_in, other_encoding
from app.data.json_array import beyond_reading, read_json
from app.data.shapes import Broken, Located
from app.data.tables import read_csv, read_parquet
from app.data.text_file import read_text
from app.errors import DataError, EnvironmentProblem


def read_file(path: Path, name: str) -> Iterator[Located]:
    """Every row of one file; `name` is what places call it."""
    kind = extension(path)
    try:
        with open_file(path) as packed:
            is_gzip = path.suffix.lower() == ".gz"
            stream = io.BufferedReader(gzip.GzipFile(fileobj=packed)) if is_gzip else packed
            if kind in _TEXT_TABLES and (problem := other_encoding(stream.peek(LOOK))):
                raise DataError(f"{name}: {problem}")
            yield from _some_whole(READERS[kind](stream, name), name, is_text=kind in TEXT_FILES)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{name}: not a whole gzip file: {error}") from error


def _some_whole(rows: Iterable[Located], name: str, *, is_text: bool) -> Iterator[Located]:
    """The rows; DataError if none of them is one, because that is no bad row but another kind of file."""
    broken, first, whole = 0, "", is_text  # a file of text is one row
    for place, row in rows:
        whole = whole or not isinstance(row, Broken)
        if isinstance(row, Broken) and not whole:
            broken, first = broken + 1, first or f"{place}: {row.reason}"
        yield place, row
    if broken and not whole:
        raise DataError(f"{name}: none of its {broken:,} rows can be read; {first}")


def extension(path: Path) -> str:
    """What decides the reader: the last suffix but `.gz`, in lower case."""
    bare = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    return bare.suffix.lower()


def open_file(path: Path) -> io.BufferedReader:
    """Its bytes."""
    try:
        return path.open("rb")
    except PermissionError as error:
        raise EnvironmentProblem(f"{path} may not be read: {error.strerror}; make it readable") from error


def _read_jsonl(stream: BinaryIO, name: str) -> Iterator[Located]:
    for number, line in enumerate(stream, 1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")  # noqa: PLW2901 (a byte order mark)
        if line.strip():
            yield f"{name}:{number}", _parse_line(line.rstrip())


def _parse_line(line: bytes) -> dict[str, object] | Broken:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Broken(not_utf8(error))
    except (ValueError, RecursionError) as error:
        return Broken(_not_json(line, error))
    if not isinstance(value, dict):
        return Broken(f"each line must be one JSON object, this one is {kind_of(value)}")
    return value


def _not_json(line: bytes, error: ValueError | RecursionError) -> str:
    if b"\0" in line:
        return f"{nul_in(line)}; each line must be one JSON object"
    if isinstance(error, json.JSONDecodeError):
        return f"column {error.colno}: {error.msg}; each line must be one JSON object"
    return beyond_reading(error)


def kind_of(value: object) -> str:
    """A value's type in words that hold for JSON, CSV and Parquet alike."""
    if value != value:  # noqa: PLR0124  what tables have in an empty cell of a column of numbers
        return "NaN"
    return _KINDS.get(type(value), f"a {type(value).__name__}")


def _read_json(stream: BinaryIO, name: str) -> Iterator[Located]:
    rows = read_json(stream, name)
    if rows is None:  # several values one after the other: JSON Lines under the wrong name
        stream.seek(0)
        yield from _read_jsonl(stream, name)
        return
    for place, value in rows:
        if isinstance(value, dict):
            yield place, value
        else:
            yield place, Broken(f"each row must be a JSON object, this one is {kind_of(value)}")


_KINDS: dict[type, str] = {
    str: "text",
    list: "a list",
    dict: "an object",
    bool: "true or false",
    type(None): "null",
    int: "a number",
    float: "a number",
    bytes: "bytes",
}
READERS: dict[str, Callable[[BinaryIO, str], Iterator[Located]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": partial(read_csv, delimiter=","),
    ".tsv": partial(read_csv, delimiter="\t"),
    ".parquet": read_parquet,
    ".txt": read_text,
    ".md": read_text,
}
TEXT_FILES = (".txt", ".md")
_TEXT_TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
