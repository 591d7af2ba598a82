"""Files to rows, each with its place. Not through `datasets`, which forgets the line of a row."""

import csv
import gzip
import hashlib
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from app.data.json_array import read_json
from app.data.shapes import Broken, Located
from app.errors import DataError, EnvironmentProblem

TEXT_COLUMN = "text"


def read_file(path: Path, name: str) -> Iterator[Located]:
    """Every row of one file; `name` is what places call it."""
    read = READERS[extension(path)]
    try:
        with _open(path) as packed:
            is_gzip = path.suffix.lower() == ".gz"
            stream = io.BufferedReader(gzip.GzipFile(fileobj=packed)) if is_gzip else packed
            yield from read(stream, name)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{name}: not a whole gzip file: {error}") from error


def extension(path: Path) -> str:
    """What decides the reader: the last suffix but `.gz`, in lower case."""
    bare = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    return bare.suffix.lower()


def hash_files(files: Iterable[tuple[Path, str]]) -> str:
    """A hash of the files' bytes and of the names they go by."""
    digest = hashlib.sha256()
    for path, name in files:
        with _open(path) as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        digest.update(f"{name}\0{content}\n".encode())
    return digest.hexdigest()


def _open(path: Path) -> io.BufferedReader:
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
        value = json.loads(line)
    except UnicodeDecodeError as error:
        return Broken(f"not UTF-8 at byte {error.start + 1} of the line; save the file as UTF-8")
    except json.JSONDecodeError as error:
        return Broken(f"column {error.colno}: {error.msg}; each line must be one JSON object")
    if not isinstance(value, dict):
        return Broken(f"each line must be one JSON object, this one is {kind_of(value)}")
    return value


def kind_of(value: object) -> str:
    """A value's type in words that hold for JSON, CSV and Parquet alike."""
    names = {str: "text", list: "a list", dict: "an object", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")


def _read_json(stream: BinaryIO, name: str) -> Iterator[Located]:
    text = _decode(stream.read(), name)
    rows = read_json(text, name)
    if rows is None:  # several values one after the other: JSON Lines under the wrong name
        yield from _read_jsonl(io.BytesIO(text.encode()), name)
        return
    for place, value in rows:
        if isinstance(value, dict):
            yield place, value
        else:
            yield place, Broken(f"each row must be a JSON object, this one is {kind_of(value)}")


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{name}:{line}: not UTF-8; save the file as UTF-8") from error


def _read_csv(stream: BinaryIO, name: str, delimiter: str) -> Iterator[Located]:
    csv.field_size_limit(sys.maxsize)  # a long answer is no mistake; the default stops at 131072 characters
    with io.TextIOWrapper(stream, "utf-8-sig", newline="") as lines:
        yield from _records(lines, name, delimiter)


def _records(lines: Iterable[str], name: str, delimiter: str) -> Iterator[Located]:
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        place = f"{name}:{reader.line_num + 1}"
        try:
            fields = next(reader, None)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{place}: cannot be read as CSV in UTF-8: {error}") from error
        if fields is None:
            return
        if not header:
            header = _header(fields, place)
        elif fields:  # blank lines are no rows
            yield place, _record(header, fields)


def _header(fields: list[str], place: str) -> list[str]:
    if not fields or len(set(fields)) < len(fields):
        raise DataError(f"{place}: the first line must name the columns, each once; found {fields}")
    return fields


def _record(header: list[str], fields: list[str]) -> dict[str, object] | Broken:
    if len(fields) != len(header):
        return Broken(f"has {len(fields)} fields where the first line names {len(header)} columns")
    return dict(zip(header, fields, strict=True))


def _read_parquet(stream: BinaryIO, name: str) -> Iterator[Located]:
    import pyarrow  # slow to import, and only needed here
    import pyarrow.parquet

    seekable = (
        io.BytesIO(stream.read()) if isinstance(stream, io.BufferedReader) and _is_gzip(stream) else stream
    )
    try:
        row = 0
        for batch in pyarrow.parquet.ParquetFile(seekable).iter_batches(1024):
            for record in batch.to_pylist():
                yield f"{name} row {row}", record
                row += 1
    except pyarrow.ArrowException as error:
        raise DataError(f"{name}: cannot be read as Parquet: {error}") from error


def _is_gzip(stream: io.BufferedReader) -> bool:
    return isinstance(stream.raw, gzip.GzipFile)


def _read_text(stream: BinaryIO, name: str) -> Iterator[Located]:
    content = stream.read()
    try:
        yield name, {TEXT_COLUMN: content.decode("utf-8-sig")}
    except UnicodeDecodeError as error:
        yield name, Broken(f"not UTF-8 at byte {error.start + 1}; save the file as UTF-8")


READERS: dict[str, Callable[[BinaryIO, str], Iterator[Located]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": partial(_read_csv, delimiter=","),
    ".tsv": partial(_read_csv, delimiter="\t"),
    ".parquet": _read_parquet,
    ".txt": _read_text,
    ".md": _read_text,
}
TEXT_FILES = (".txt", ".md")
