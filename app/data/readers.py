"""Files to rows, each with its source location. Not through `datasets`, which forgets the line of a row.

A kind of file is one entry of `READERS`. Files are UTF-8; another encoding is an error, never guessed.
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from app.data.types import Broken, Located, escaped, kind_of
from app.errors import DataError, EnvironmentProblem

TEXT_FILES = (".txt", ".md")
TEXT_COLUMN = "text"
PACKED_FILES = (".gz", ".zst")
_MAX_TEXT_BYTES = 1 << 30
_MAX_JSON_BYTES = 512 << 20  # what `json` makes of them takes several times as much memory
_MAX_JSON_PARTS = 20_000_000  # lists and objects, each of which takes a hundred bytes
_MAX_ROW_BYTES = 64 << 20
_MAX_HEADER_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 20  # read at once
_TABLE_BATCH_ROWS = 256
_ARROW_FILE = b"ARROW1"  # how one begins; a stream has no mark
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_NO_ARRAY = "expected an array of rows, or an object that holds one"


def read_file(path: Path, name: str) -> Iterator[Located]:
    """Every row of one file; `name` is how locations show it."""
    kind = extension(path)
    try:
        with open_file(path) as packed:
            stream = _unpacked(packed, path)
            if kind not in _TABLES and stream.peek(2).startswith(_UTF16_MARKS):
                raise DataError(f"{name}: is UTF-16, expected UTF-8; type: iconv -f UTF-16 -t UTF-8 OLD > NEW")
            if stream.peek(len(_LFS_POINTER)).startswith(_LFS_POINTER):
                raise DataError(
                    f"{name}: is a pointer of Git LFS, and the file itself was not fetched; type: git lfs pull"
                )
            yield from READERS[kind](stream, name)
    except (EOFError, zlib.error, OSError) as error:
        packing = path.suffix.lower()
        if packing not in PACKED_FILES or getattr(error, "errno", None) is not None:
            raise
        raise DataError(f"{name}: not a whole {packing} file: {error}") from error


def _unpacked(packed: io.BufferedReader, path: Path) -> io.BufferedReader:
    if path.suffix.lower() == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=packed))
    if path.suffix.lower() == ".zst":
        import pyarrow  # slow to import

        return io.BufferedReader(pyarrow.CompressedInputStream(packed, "zstd"))
    return packed


def extension(path: Path) -> str:
    """The suffix that decides the reader, in lower case; for a packed file of text, the one before `.gz` or `.zst`."""
    suffix = path.suffix.lower()
    inner = path.with_suffix("").suffix.lower()
    return inner if suffix in PACKED_FILES and inner not in _TABLES else suffix


def open_file(path: Path) -> io.BufferedReader:
    """Open for reading bytes; a file that may not be read is the user's error."""
    try:
        return path.open("rb")
    except PermissionError as error:
        raise EnvironmentProblem(f"{path} may not be read: {error.strerror}; make it readable") from error


def _read_jsonl(stream: BinaryIO, name: str) -> Iterator[Located]:
    """Lines end in line feeds, carriage returns or both."""
    number = 0
    for line in iter(partial(stream.readline, _MAX_ROW_BYTES + 1), b""):
        if len(line) > _MAX_ROW_BYTES:
            raise DataError(
                f"{name}: has a line of more than {_MAX_ROW_BYTES >> 20} MB, and each line must be one row, a JSON"
                " object; a file that is one array is called .json"
            )
        for part in line.rstrip().split(b"\r"):
            number += 1
            row = part.removeprefix(_BYTE_ORDER_MARK) if number == 1 else part
            if row.strip():
                yield f"{name}:{number}", _parse_line(row)


class _SameKeyError(ValueError):
    """A key that stands twice in one object."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _SameKeyError(f"the key {twice!r} stands twice in one object")
    return found


def _parse_line(line: bytes) -> dict[str, object] | Broken:
    try:
        value = json.loads(line.decode(), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        byte = f"byte {error.start + 1} of the line (0x{error.object[error.start]:02x})"
        return Broken(f"not UTF-8 at {byte}; save the file as UTF-8")
    except json.JSONDecodeError as error:
        found = "it holds NUL bytes, as damaged files do" if b"\0" in line else f"column {error.colno}: {error.msg}"
        return Broken(f"{found}; each line must be one JSON object")
    except (ValueError, RecursionError) as error:
        return Broken(_unreadable_json(error))
    if not isinstance(value, dict):
        advice = "; a file that is one array is called .json" if isinstance(value, list) else ""
        return Broken(f"each line must be one JSON object, this one is {kind_of(value)}{advice}")
    return value


def _unreadable_json(error: ValueError | RecursionError) -> str:
    """Reason why valid JSON cannot be read."""
    if isinstance(error, RecursionError):
        return "lists or objects in it are nested too deeply"
    if isinstance(error, _SameKeyError):
        return str(error)
    return "holds a number of more than 4,300 digits; if it is none, put it in quotes"


def _read_json(stream: BinaryIO, name: str) -> Iterator[Located]:
    """The rows of an array, of an object's only array, or one row; the location is their index."""
    raw = _read_whole(
        stream,
        _MAX_JSON_BYTES,
        f"{name}: a JSON file is read as a whole, and of more than 512 MB none is; convert to JSONL, a row a line:"
        " jq -c '.[]' OLD > NEW.jsonl",
    )
    if raw.count(b"[") + raw.count(b"{") > _MAX_JSON_PARTS:
        raise DataError(f"{name}: has more than {_MAX_JSON_PARTS:,} lists and objects; convert it to JSON Lines")
    value = _json_value(raw, name)
    if value is None:
        yield from _read_jsonl(io.BytesIO(raw), name)
        return
    del raw
    for number, row in enumerate(_array(value, name)):
        broken = Broken(f"each row must be a JSON object, this one is {kind_of(row)}")
        yield f"{name}[{number}]", row if isinstance(row, dict) else broken


def _json_value(raw: bytes, name: str) -> object:
    """None if another value follows the first: JSON Lines under the wrong name."""
    text = ""
    try:
        text = raw.decode("utf-8-sig")
        return json.loads(text, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(f"{name}:{line}: not UTF-8; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            return None
        found = error.msg if text[: error.pos].strip() else _NO_ARRAY
        raise DataError(f"{name}:{error.lineno}: column {error.colno}: not valid JSON: {found}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}: not valid JSON: {_unreadable_json(error)}") from error


def _array(value: object, name: str) -> list[Any]:
    """The rows: an array, the only array of an object, or one object with texts or a conversation."""
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        raise DataError(f"{name}: {_NO_ARRAY}")
    arrays = [inner for inner in value.values() if isinstance(inner, list)]
    firsts = [inner[0].keys() for inner in arrays if inner and isinstance(inner[0], dict)]
    has_texts = not arrays and any(isinstance(inner, str) for inner in value.values())
    if has_texts or any({"role", "content"} <= keys or {"from", "value"} <= keys for keys in firsts):
        return [value]
    if not arrays and value and all(isinstance(inner, dict) for inner in value.values()):
        raise DataError(
            f"{name}: expected an array of rows, this is an object of {len(value):,} objects; type: jq -c '.[]' OLD >"
            " NEW.jsonl"
        )
    if len(arrays) != 1:
        raise DataError(f"{name}: expected an array of rows, or an object with exactly one; it has {len(arrays)}")
    return arrays[0]


def _read_text(stream: BinaryIO, name: str) -> Iterator[Located]:
    """Read the file as one document; one that is not text is broken as a whole."""
    raw = _read_whole(
        stream,
        _MAX_TEXT_BYTES,
        f"{name}: a text file is one document, and of more than 1 GB none is read; split it into files, or into"
        ' rows of JSON Lines, {"text": "..."}',
    )
    try:
        yield name, {TEXT_COLUMN: raw.decode().removeprefix("\ufeff")}
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        yield name, Broken(f"not UTF-8 at byte {error.start + 1}, in line {line}; save the file as UTF-8")


def _read_whole(stream: BinaryIO, max_bytes: int, problem: str) -> bytes:
    """All bytes; DataError if there are more than `max_bytes`."""
    raw = b"".join(islice(iter(partial(stream.read, _BLOCK_BYTES), b""), max_bytes // _BLOCK_BYTES + 1))
    if len(raw) > max_bytes:
        raise DataError(problem)
    return raw


def _read_csv(stream: io.BufferedReader, name: str, delimiter: str) -> Iterator[Located]:
    """One row for each record after the first; its location is the line that it begins in."""
    names, _, _ = stream.peek(_BLOCK_BYTES).partition(b"\n")
    if delimiter == "," and b";" in names and b"," not in names:
        delimiter = ";"  # as spreadsheets write where the comma is in numbers
    csv.field_size_limit(_MAX_ROW_BYTES)  # the default stops at 131072 characters
    # A byte that is not UTF-8 makes only its own row bad: a strict decoder would fail thousands of lines earlier.
    with io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="") as lines:
        reader = csv.reader(_bounded(lines, name), delimiter=delimiter, strict=True)
        header: list[str] = []
        while True:
            location = f"{name}:{reader.line_num + 1}"
            try:
                fields = next(reader, None)
            except csv.Error as error:
                reason = escaped(str(error))
                raise DataError(
                    f"{location}: cannot be read as CSV: {reason}; a field with quotes stands in quotes that are"
                    " closed, and each quote inside it is written as two"
                ) from error
            if fields is None:
                return
            if fields and header:  # blank lines are no rows
                yield location, _record(header, fields)
            elif fields:
                header = _header(fields, location)


def _bounded(lines: io.TextIOWrapper, name: str) -> Iterator[str]:
    """The lines of a file, the first of which names the columns."""
    longest = _MAX_HEADER_BYTES
    while line := lines.readline(longest + 1):
        if len(line) > longest:
            raise DataError(f"{name}: has a line of more than {longest >> 20} MB, which is no row of a table")
        longest = 2 * _MAX_ROW_BYTES + _MAX_HEADER_BYTES  # fields have a limit of their own
        yield line


def _header(fields: list[str], location: str) -> list[str]:
    problem = _not_utf8(fields)
    if problem or len(set(fields)) < len(fields):
        raise DataError(
            f"{location}: the first line must name the columns, each once; {problem or f'found {fields[:20]}'}"
        )
    return fields


def _record(header: list[str], fields: list[str]) -> dict[str, object] | Broken:
    if len(fields) != len(header):
        return Broken(
            f"has {len(fields)} field{'s' * (len(fields) != 1)} where the first line names {len(header)} columns"
        )
    problem = _not_utf8(fields)
    # an empty cell is null, as in JSON: its row has no answer, not an empty one
    return Broken(problem) if problem else {name: field or None for name, field in zip(header, fields, strict=True)}


def _not_utf8(fields: list[str]) -> str:
    """The first byte that is not UTF-8; empty if there is none."""
    try:
        "".join(fields).encode()
    except UnicodeEncodeError as error:
        return f"not UTF-8 (the byte 0x{ord(error.object[error.start]) - 0xDC00:02x}); save the file as UTF-8"
    return ""


def _read_table(stream: BinaryIO, name: str, batches: Callable[[BinaryIO], Iterator[Any]]) -> Iterator[Located]:
    import pyarrow  # slow to import, and only needed here

    row = 0
    try:
        for batch in batches(stream):
            batch.validate(full=True)  # offsets of a damaged file would lead out of its memory
            for record in batch.to_pylist():
                yield f"{name} row {row}", record
                row += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # damaged pages are an OSError
        reason = escaped(str(error))
        raise DataError(f"{name}: cannot be read as a table, from row {row} on: {reason}") from error


def _parquet_batches(stream: BinaryIO) -> Iterator[Any]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(stream, page_checksum_verification=True)
    yield from file.iter_batches(_TABLE_BATCH_ROWS)


def _arrow_batches(stream: BinaryIO) -> Iterator[Any]:
    """Batches of an Arrow file (Feather is one), or of a stream, as `datasets` keeps its cache."""
    import pyarrow

    start = stream.read(len(_ARROW_FILE))
    stream.seek(0)
    if start == _ARROW_FILE:
        file = pyarrow.ipc.open_file(stream)
        found = (file.get_batch(number) for number in range(file.num_record_batches))
    else:
        found = iter(pyarrow.ipc.open_stream(stream))
    for batch in found:
        yield from (batch.slice(at, _TABLE_BATCH_ROWS) for at in range(0, len(batch), _TABLE_BATCH_ROWS))


_TABLES: dict[str, Callable[[BinaryIO, str], Iterator[Located]]] = {
    ".parquet": partial(_read_table, batches=_parquet_batches),
    ".arrow": partial(_read_table, batches=_arrow_batches),
    ".feather": partial(_read_table, batches=_arrow_batches),
}
READERS: dict[str, Callable[[Any, str], Iterator[Located]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": partial(_read_csv, delimiter=","),
    ".tsv": partial(_read_csv, delimiter="\t"),
    **_TABLES,
    **dict.fromkeys(TEXT_FILES, _read_text),
}
