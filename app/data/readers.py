"""Files to rows, each with its source location. Not through `datasets`, which forgets the line of a row.

A kind of file is one entry of `READERS`. Files are UTF-8; another encoding is an error, never guessed.
"""

import contextlib
import csv
import gzip
import io
import json
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from app.data.types import Broken, Located, kind_of, printable
from app.errors import DataError, EnvironmentProblem

TEXT_FILES = (".txt", ".md")
PACKED_FILES = (".gz", ".zst")
TEXT_COLUMN = "text"
_MAX_TEXT_BYTES = 1 << 30
_MAX_JSON_BYTES = 512 << 20  # what `json` makes of them takes several times as much memory
_BLOCK_BYTES = 1 << 20  # read at once
_ENCODING_BYTES = 64  # of a file's beginning show its encoding
_TABLE_BATCH_ROWS = 256
_ARROW_FILE = b"ARROW1"  # how one begins; a stream has no mark
_BYTE_ORDER_MARKS = (
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
_NO_ARRAY = "expected an array of rows, or an object that holds one"


def read_file(path: Path, name: str) -> Iterator[Located]:
    """Every row of one file; `name` is how locations show it."""
    kind = extension(path)
    try:
        with open_file(path) as packed:
            stream = _unpacked(packed, path)
            if kind in _TEXT_TABLES and (problem := _other_encoding(stream.peek(_ENCODING_BYTES))):
                raise DataError(f"{name}: {problem}")
            yield from _refuse_all_broken(READERS[kind](stream, name), name, is_text=kind in TEXT_FILES)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{name}: not a whole gzip file: {error}") from error
    except OSError as error:
        if path.suffix.lower() != ".zst" or error.errno is not None:
            raise
        raise DataError(f"{name}: not a whole Zstandard file: {error}") from error


def _unpacked(packed: io.BufferedReader, path: Path) -> io.BufferedReader:
    if path.suffix.lower() == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=packed))
    if path.suffix.lower() == ".zst":
        import pyarrow  # slow to import

        return io.BufferedReader(pyarrow.CompressedInputStream(packed, "zstd"))
    return packed


def _refuse_all_broken(rows: Iterable[Located], name: str, *, is_text: bool) -> Iterator[Located]:
    """Pass rows on; DataError if all are broken, because then it is another kind of file."""
    broken, first, any_whole = 0, "", is_text  # a file of text is one row
    for location, row in rows:
        any_whole = any_whole or not isinstance(row, Broken)
        if isinstance(row, Broken) and not any_whole:
            broken, first = broken + 1, first or f"{location}: {row.reason}"
        yield location, row
    if broken and not any_whole:
        raise DataError(f"{name}: none of its {broken:,} rows can be read; {first}")


def extension(path: Path) -> str:
    """The last suffix but that of a packed file, in lower case; it decides the reader."""
    bare = path.with_suffix("") if path.suffix.lower() in PACKED_FILES else path
    return bare.suffix.lower()


def open_file(path: Path) -> io.BufferedReader:
    """Open for reading bytes; a file that may not be read is the user's error."""
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
        byte = f"byte {error.start + 1} of the line (0x{error.object[error.start]:02x})"
        return Broken(f"not UTF-8 at {byte}; save the file as UTF-8")
    except json.JSONDecodeError as error:
        found = _nul_in(line) or f"column {error.colno}: {error.msg}"
        return Broken(f"{found}; each line must be one JSON object")
    except (ValueError, RecursionError) as error:
        return Broken(_unreadable_json(error))
    if not isinstance(value, dict):
        advice = "; a file that is one array is called .json" if isinstance(value, list) else ""
        return Broken(f"each line must be one JSON object, this one is {kind_of(value)}{advice}")
    return value


def _unreadable_json(error: ValueError | RecursionError) -> str:
    """Why valid JSON cannot be read."""
    if isinstance(error, RecursionError):
        return "lists or objects in it are nested too deeply"
    return "holds a number of more than 4,300 digits; if it is none, put it in quotes"


def _read_json(stream: BinaryIO, name: str) -> Iterator[Located]:
    """The rows of an array, of an object's only array, or one row; the location is their index."""
    raw = _read_whole(
        stream,
        _MAX_JSON_BYTES,
        f"{name}: a JSON file is read as a whole, and of more than 512 MB none is; convert to JSONL, a row a line:"
        " jq -c '.[]' OLD > NEW.jsonl",
    )
    value = _json_value(raw, name)
    if value is None:
        yield from _read_jsonl(io.BytesIO(raw), name)
        return
    del raw
    rows = [value] if _is_row(value) else _only_array(value, name)
    for number, row in enumerate(rows):
        broken = Broken(f"each row must be a JSON object, this one is {kind_of(row)}")
        yield f"{name}[{number}]", row if isinstance(row, dict) else broken


def _json_value(raw: bytes, name: str) -> object:
    """None if another value follows the first: JSON Lines under the wrong name."""
    text = ""
    try:
        text = raw.decode("utf-8-sig")
        return json.loads(text)
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


def _is_row(value: object) -> bool:
    """Whether an object is one row, with texts or a conversation, and not a wrapper of rows."""
    if not isinstance(value, dict):
        return False
    arrays = [inner for inner in value.values() if isinstance(inner, list)]
    if not arrays:
        return any(isinstance(inner, str) for inner in value.values())
    firsts = [inner[0] for inner in arrays if inner and isinstance(inner[0], dict)]
    return any({"role", "content"} <= set(first) or {"from", "value"} <= set(first) for first in firsts)


def _only_array(value: object, name: str) -> list[Any]:
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        raise DataError(f"{name}: {_NO_ARRAY}")
    arrays = [key for key, inner in value.items() if isinstance(inner, list)]
    if len(arrays) != 1:
        raise DataError(
            f"{name}: expected an array of rows, or an object with exactly one; arrays found:"
            f" {', '.join(arrays) or 'none'}"
        )
    return list(value[arrays[0]])


def _read_text(stream: BinaryIO, name: str) -> Iterator[Located]:
    """Read the file as one document; one that is not text is broken as a whole."""
    too_large = (
        f"{name}: a text file is one document, and of more than 1 GB none is read; split it into files, or into"
        ' rows of JSON Lines, {"text": "..."}'
    )
    yield name, _document(_read_whole(stream, _MAX_TEXT_BYTES, too_large))


def _document(raw: bytes) -> dict[str, object] | Broken:
    problem = _other_encoding(raw) or _nul_in(raw)
    try:
        return Broken(problem) if problem else {TEXT_COLUMN: raw.decode().removeprefix("\ufeff")}
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        return Broken(f"not UTF-8 at byte {error.start + 1}, in line {line}; save the file as UTF-8")


def _read_whole(stream: BinaryIO, max_bytes: int, problem: str) -> bytes:
    """All bytes; DataError if there are more than `max_bytes`."""
    raw = b"".join(islice(iter(partial(stream.read, _BLOCK_BYTES), b""), max_bytes // _BLOCK_BYTES + 1))
    if len(raw) > max_bytes:
        raise DataError(problem)
    return raw


def _other_encoding(start: bytes) -> str:
    """The problem of a file whose beginning is not UTF-8; empty where it may be."""
    found = next((name for mark, name in _BYTE_ORDER_MARKS if start.startswith(mark)), "")
    even, odd = start[:_ENCODING_BYTES:2], start[1:_ENCODING_BYTES:2]
    # UTF-16 of Latin letters has a NUL in every other byte; text in UTF-8 has none at all
    if not found and odd and all(even) and not any(odd):
        found = "UTF-16LE"
    if not found and odd and all(odd) and not any(even):
        found = "UTF-16BE"
    if not found:
        return ""
    return f"is {found}, expected UTF-8; save it as UTF-8, or type: iconv -f {found} -t UTF-8 OLD > NEW"


def _nul_in(line: bytes | str) -> str:
    """Say where the first NUL is; empty if there is none."""
    at = line.find(b"\0") if isinstance(line, bytes) else line.find("\0")
    unit = "byte" if isinstance(line, bytes) else "character"
    return f"{unit} {at + 1} is NUL, which no text has: the file is damaged, or not text" if at >= 0 else ""


def _read_csv(stream: io.BufferedReader, name: str, delimiter: str) -> Iterator[Located]:
    """One row for each record after the first; its location is the line that it begins in."""
    names, _, _ = stream.peek(_BLOCK_BYTES).partition(b"\n")
    if delimiter == "," and b";" in names and b"," not in names:
        delimiter = ";"  # as spreadsheets write where the comma is in numbers
    csv.field_size_limit(sys.maxsize)  # a long answer is no mistake; the default stops at 131072 characters
    # A byte that is not UTF-8 makes only its own row bad: a strict decoder would fail thousands of lines earlier.
    with io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="") as lines:
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        header: list[str] = []
        while True:
            location = f"{name}:{reader.line_num + 1}"
            try:
                fields = next(reader, None)
            except csv.Error as error:
                raise DataError(f"{location}: cannot be read as CSV: {_csv_problem(error)}") from error
            if fields is None:
                return
            if fields and header:  # blank lines are no rows
                yield location, _record(header, fields)
            elif fields:
                header = _header(fields, location)


def _csv_problem(error: csv.Error) -> str:
    if "unexpected end of data" in str(error):
        return 'a quote (") that opens in this row is never closed; close it, or write a quote inside a field as two'
    return f"{error}; a field with quotes stands in quotes, and each quote inside it is written as two"


def _header(fields: list[str], location: str) -> list[str]:
    problem = _not_text(fields)
    if problem or len(set(fields)) < len(fields):
        found = problem or f"found {fields}"
        raise DataError(f"{location}: the first line must name the columns, each once; {found}")
    return fields


def _record(header: list[str], fields: list[str]) -> dict[str, object] | Broken:
    if len(fields) != len(header):
        return Broken(
            f"has {len(fields)} field{'s' * (len(fields) != 1)} where the first line names {len(header)} columns"
        )
    problem = _not_text(fields)
    return Broken(problem) if problem else dict(zip(header, fields, strict=True))


def _not_text(fields: list[str]) -> str:
    """Why a record is not text; empty if it is."""
    for field in fields:
        try:
            field.encode()
        except UnicodeEncodeError as error:
            byte = ord(error.object[error.start]) - 0xDC00
            return f"not UTF-8 (the byte 0x{byte:02x}); save the file as UTF-8"
        if "\0" in field:
            return _nul_in(field)
    return ""


def _read_parquet(stream: BinaryIO, name: str) -> Iterator[Located]:
    import pyarrow.parquet  # slow to import, and only needed here

    def batches(opened: BinaryIO) -> Iterator[Any]:
        file = pyarrow.parquet.ParquetFile(opened, page_checksum_verification=True)
        yield from file.iter_batches(_TABLE_BATCH_ROWS)

    yield from _read_table(stream, name, "Parquet", batches)


def _read_arrow(stream: BinaryIO, name: str) -> Iterator[Located]:
    """Read a file of Arrow (Feather is one), or a stream, as `datasets` keeps its cache."""
    import pyarrow

    def batches(opened: BinaryIO) -> Iterator[Any]:
        start = opened.read(len(_ARROW_FILE))
        opened.seek(0)
        if start == _ARROW_FILE:
            file = pyarrow.ipc.open_file(opened)
            found = (file.get_batch(number) for number in range(file.num_record_batches))
        else:
            found = iter(pyarrow.ipc.open_stream(opened))
        for batch in found:
            yield from (batch.slice(at, _TABLE_BATCH_ROWS) for at in range(0, len(batch), _TABLE_BATCH_ROWS))

    yield from _read_table(stream, name, "Arrow", batches)


def _read_table(
    stream: BinaryIO, name: str, kind: str, batches: Callable[[BinaryIO], Iterator[Any]]
) -> Iterator[Located]:
    import pyarrow

    with _seekable(stream) as opened:
        row = 0
        try:
            for batch in batches(opened):
                for record in _records(batch):
                    yield f"{name} row {row}", record
                    row += 1
        except (pyarrow.ArrowException, OSError) as error:  # damaged pages are an OSError
            reason = printable(str(error))
            raise DataError(f"{name}: cannot be read as {kind}, from row {row} on: {reason}") from error


def _records(batch: Any) -> list[Any]:
    """The records of an Arrow batch; read one by one where a text is not UTF-8."""
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError as error:
        if len(batch) == 1:
            return [Broken(f"a text in it is not UTF-8 (the byte 0x{error.object[error.start]:02x})")]
        return [record for row in range(len(batch)) for record in _records(batch.slice(row, 1))]


@contextlib.contextmanager
def _seekable(stream: BinaryIO) -> Iterator[BinaryIO]:
    """Tables are read from their end, which a packed file has only when all is unpacked: on disk, not in memory."""
    if isinstance(stream, io.BufferedReader) and isinstance(stream.raw, io.FileIO):
        yield stream
        return
    with tempfile.TemporaryFile() as unpacked:
        shutil.copyfileobj(stream, unpacked)
        unpacked.seek(0)
        yield unpacked


READERS: dict[str, Callable[[BinaryIO, str], Iterator[Located]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": partial(_read_csv, delimiter=","),
    ".tsv": partial(_read_csv, delimiter="\t"),
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
    **dict.fromkeys(TEXT_FILES, _read_text),
}
_TEXT_TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
