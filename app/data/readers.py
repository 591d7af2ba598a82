"""File readers: rows with their source location, and the dialect of CSV and TSV files.

A file type is one entry of `READERS`. Files must be UTF-8; other encodings are an error and are never guessed.
"""

import csv
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, zip_longest
from typing import Any, BinaryIO

from app.data.advised_commands import check_of_converted
from app.data.rows import TABLE_FILES, Broken, DataFile, Located, Row, awk_of_tagged_words, escaped, extension, kind_of
from app.errors import DataError
from app.safe_text import listed, many

MAX_FIELD_BYTES = 64 << 20
_MAX_HEADER_BYTES = 1 << 20
_DELIMITERS = (",", ";", "\t", "|")
_INSPECTED_ROWS = 200  # compared with the first line
_MIN_PROSE_WORDS = 4  # of a field that is not a column name
_LAST_LINE = "\0end of file\n"

Dialect = dict[str, Any]  # arguments of csv.reader


def read_csv(stream: io.BufferedReader, file: DataFile, delimiter: str) -> Iterator[Located]:
    """Yield one row per record after the header, located by its first line. An empty cell is null."""
    csv.field_size_limit(MAX_FIELD_BYTES)  # the default stops at 131072 characters
    dialect = _dialect_of(file, _delimiter(stream, delimiter))
    records = _records(_lines(stream, file.name), file.name, dialect)
    number, fields = next(records, (0, []))
    if not fields:
        return
    header = _header(fields, file, number)
    first = list(islice(records, _INSPECTED_ROWS))
    _require_names(header, [fields for _, fields in first], file, dialect["delimiter"])
    for number, fields in chain(first, records):
        yield f"{file.name}:{number}", _record(header, fields, file, dialect["delimiter"])


def _delimiter(stream: io.BufferedReader, usual: str) -> str:
    """Return the delimiter of the first line: the usual one, unless the line has only others."""
    first = next(filter(bytes.strip, stream.peek(_MAX_HEADER_BYTES).splitlines()), b"").decode(errors="replace")
    counts = Counter({delimiter: first.count(delimiter) for delimiter in _DELIMITERS})
    return usual if counts[usual] or not any(counts.values()) else counts.most_common(1)[0][0]


def _lines(stream: io.BufferedReader, name: str) -> Iterator[str]:
    """Yield the lines of a file; the first line names the columns."""
    longest = _MAX_HEADER_BYTES
    # An invalid UTF-8 byte makes only its row bad: a strict decoder would fail thousands of lines earlier.
    with io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="") as lines:
        while line := lines.readline(longest + 1):
            if len(line) > longest:
                raise DataError(f"{name}: a line is longer than {longest >> 20} MB, so this is not a table")
            longest = 2 * MAX_FIELD_BYTES + _MAX_HEADER_BYTES  # fields have a separate limit
            yield line


def _records(lines: Iterable[str], name: str, dialect: Dialect) -> Iterator[tuple[int, list[str]]]:
    """Yield the nonblank records with their first line number."""
    reader = csv.reader(lines, **dialect)
    while True:
        number = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"{name}:{number}: cannot be read as CSV: {escaped(str(error))}; quote a field that contains"
                ' quotes, and write " as "" inside it'
            ) from error
        if fields is None:
            return
        if fields:
            yield number, fields


@dataclass(slots=True)
class _Scan:
    """Result of reading a file with one dialect."""

    widths: set[int] = field(default_factory=set)  # numbers of fields
    error: int = 0  # line of the first unreadable record
    spans_lines: bool = False  # a field contains a line break
    last: list[str] = field(default_factory=list)


def _scan(file: DataFile, dialect: Dialect, *more: str) -> _Scan:
    scan = _Scan()
    with file.opened() as stream:
        reader = csv.reader(chain(_lines(stream, file.name), more), **dialect)
        number = 0
        try:
            for fields in reader:
                scan.spans_lines |= reader.line_num > number + 1
                number, scan.last = reader.line_num, fields
                scan.widths |= {len(fields)} if fields else set()
        except csv.Error:
            scan.error = number + 1
    return scan


def _dialect_of(file: DataFile, delimiter: str) -> Dialect:
    """Return the dialect of the file: strict, without quotes (only TSV), or with unescaped inner quotes."""
    strict: Dialect = {"delimiter": delimiter, "strict": True}
    scan = _scan(file, strict)
    place = f"{file.name}:{scan.error}" if scan.error else file.name
    if delimiter == "\t" and (scan.error or scan.spans_lines):
        plain = {**strict, "quoting": csv.QUOTE_NONE}
        plain_scan = _scan(file, plain)
        if len(plain_scan.widths) == 1 and plain_scan.widths != {1} and not plain_scan.error:
            file.notes.append(
                f"{place}: quotes are read as ordinary characters because they do not enclose whole fields"
            )
            return plain
    loose = {**strict, "strict": False}
    if scan.error and _scan(file, loose, _LAST_LINE).last == [_LAST_LINE.strip()]:  # otherwise a quote is never closed
        file.notes.append(
            f'{place}: a quote inside a quoted field is not written as ""; check that its rows are read correctly'
        )
        return loose
    return strict


def _header(fields: list[str], file: DataFile, number: int) -> list[str]:
    place = f"{file.name}:{number}: the first line must name the columns"
    problem = _not_utf8(fields, file)
    if problem or len(set(fields)) < len(fields):
        raise DataError(f"{place}, each once; {problem or f'found {fields[:20]}'}")
    return fields


def _require_names(header: list[str], rows: Sequence[list[str]], file: DataFile, delimiter: str) -> None:
    """Raise DataError if the first line is a row: it has a text, and a value that also occurs in the rows below."""
    columns = zip_longest(*rows, fillvalue="")
    again = {at for at, (name, values) in enumerate(zip(header, columns, strict=False)) if name and name in values}
    texts = {at for at, name in enumerate(header) if len(name.split()) >= _MIN_PROSE_WORDS}
    if not again or not texts or again & texts:
        return
    guesses = {min(again): "label", min(texts): "text"}
    names = [guesses.get(at, f"column{at + 1}") for at in range(len(header))]
    line = delimiter.join(names).replace("\t", "\\t")
    raise DataError(
        f"{file.name}: the first line must name the columns, but looks like a row: {header[min(texts)][:40]!r} ..."
        f" To add a line of names, type: {file.with_first_line(line)}"
    )


def _record(header: list[str], fields: list[str], file: DataFile, delimiter: str) -> dict[str, Any] | Broken:
    if len(fields) != len(header):
        counts = f"found {many(len(fields), 'field')}, but the first line names {many(len(header), 'column')}"
        advice = f"; put a field that contains {delimiter!r} in double quotes" if len(fields) > len(header) else ""
        return Broken(f"{counts}{advice}")
    problem = _not_utf8(fields, file)
    # an empty cell is null, as in JSON: its row has no answer instead of an empty one
    return Broken(problem) if problem else {name: cell or None for name, cell in zip(header, fields, strict=True)}


def _not_utf8(fields: list[str], file: DataFile) -> str:
    """Return the problem of the first invalid UTF-8 byte; empty if there is none."""
    try:
        "".join(fields).encode()
    except UnicodeEncodeError as error:
        byte = f"0x{ord(error.object[error.start]) - 0xDC00:02x}"
        return f"not UTF-8 (byte {byte}); {file.as_utf8()}"
    return ""


# ---- readers


TEXT_FILES = (".txt", ".md")
TEXT_COLUMN = "text"
_MAX_TEXT_BYTES = 1 << 30
_MAX_JSON_BYTES = 512 << 20  # parsed JSON takes several times as much memory
_MAX_JSON_PARTS = 20_000_000  # lists and objects, about a hundred bytes each
_MAX_ROW_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20  # per read
_TABLE_BATCH_ROWS = 256
_ARROW_FILE = b"ARROW1"  # start of a file; a stream has no magic bytes
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_SPREAD_OUT = {b"{": ".", b"[": ".[]"}  # first line of multi-line JSON, with the jq selection of its rows
_NO_ARRAY = "expected an array of rows, or an object with one"
_INSPECTED_LINES = 50
_MIN_LINES = 2
_TAG = re.compile(r"O|[BIESLU]-\S+")


def read_file(file: DataFile) -> Iterator[Located]:
    """Yield the rows of one file."""
    name, kind = file.name, extension(file.path)
    try:
        with file.opened() as stream:
            if kind not in TABLE_FILES and stream.peek(2).startswith(_UTF16_MARKS):
                command = file.converted("iconv -f UTF-16 -t UTF-8")
                raise DataError(f"{name}: is UTF-16, expected UTF-8; type: {command}")
            if stream.peek(len(_LFS_POINTER)).startswith(_LFS_POINTER):
                raise DataError(f"{name}: is a Git LFS pointer, the file was not downloaded; type: git lfs pull")
            yield from READERS[kind](stream, file)
    except (EOFError, zlib.error, OSError) as error:
        if not file.packing or getattr(error, "errno", None) is not None:
            raise
        raise DataError(f"{name}: not a complete {file.packing} file: {error}") from error


def _read_jsonl(stream: BinaryIO, file: DataFile) -> Iterator[Located]:
    """Yield the rows of JSON Lines; lines end with LF, CR or both."""
    name, number, is_first = file.name, 0, True
    for line in iter(partial(stream.readline, _MAX_ROW_BYTES + 1), b""):
        if len(line) > _MAX_ROW_BYTES:
            raise DataError(
                f"{name}: a line is longer than {_MAX_ROW_BYTES >> 20} MB; each line must be one JSON object;"
                f" to convert an array to rows, type: {file.jq('.[]')}"
            )
        for part in line.rstrip().split(b"\r"):
            number += 1
            row = part.removeprefix(_BYTE_ORDER_MARK) if number == 1 else part
            if is_first and (selection := _SPREAD_OUT.get(row.strip())):
                raise DataError(
                    f"{name}:{number}: each line must be one JSON object, but the JSON spans several lines; type:"
                    f" {file.jq(selection)}"
                )
            if row.strip():
                is_first = False
                yield f"{name}:{number}", _parse_line(row, file)


class _SameKeyError(ValueError):
    """Duplicate key in one object."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for key in keys if keys.count(key) > 1)
        raise _SameKeyError(f"duplicate key {duplicate!r} in one object")
    return value


def _parse_line(line: bytes, file: DataFile) -> dict[str, object] | Broken:
    try:
        value = json.loads(line.decode(), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        byte = f"byte {error.start + 1} of the line (0x{error.object[error.start]:02x})"
        return Broken(f"not UTF-8 at {byte}; {file.as_utf8()}")
    except json.JSONDecodeError as error:
        if error.doc[error.pos :].strip() == ",":
            command = file.converted("sed 's/,[[:space:]]*$//'")
            return Broken(f"each line must be one JSON object, without a comma after it; type: {command}")
        problem = "contains NUL bytes (damaged file)" if b"\0" in line else f"column {error.colno}: {error.msg}"
        return Broken(f"{problem}; each line must be one JSON object")
    except (ValueError, RecursionError) as error:
        return Broken(_unreadable_json(error))
    if not isinstance(value, dict):
        return Broken(f"each line must be one JSON object, found {_kind_with_command(value, file)}")
    return value


def _kind_with_command(value: Any, file: DataFile, rows: str = "") -> str:
    """Return the type of a row that is not an object, with a conversion command; `rows` selects rows for jq."""
    first = value[0] if isinstance(value, list) and value else None
    selection = "{text: .}" if isinstance(value, str) else ""
    if isinstance(first, dict):
        selection = "{messages: .}" if "role" in first else "{conversations: .}" if "from" in first else ".[]"
    command = f"; type: {file.jq(' | '.join(filter(None, (rows, selection))))}" if selection else ""
    return kind_of(value) + command


def _unreadable_json(error: ValueError | RecursionError) -> str:
    """Return the reason why valid JSON cannot be read."""
    if isinstance(error, RecursionError):
        return "lists or objects are nested too deeply"
    if isinstance(error, _SameKeyError):
        return str(error)
    return "a number has more than 4,300 digits; if it is not a number, put it in quotes"


def _read_json(stream: BinaryIO, file: DataFile) -> Iterator[Located]:
    """Yield the rows of an array, of the only array in an object, or one row; the location is the index."""
    name = file.name
    as_lines = f"to convert an array to JSON Lines, type: {file.jq('.[]')}"
    raw = _read_whole(
        stream, _MAX_JSON_BYTES, f"{name}: a JSON file may have at most {_MAX_JSON_BYTES >> 20} MB; {as_lines}"
    )
    if raw.count(b"[") + raw.count(b"{") > _MAX_JSON_PARTS:
        raise DataError(f"{name}: has more than {_MAX_JSON_PARTS:,} lists and objects; {as_lines}")
    value = _json_value(raw, file)
    if value is None:
        yield from _read_jsonl(io.BytesIO(raw), file)
        return
    del raw
    selection, rows = _array(value, file)
    for number, row in enumerate(rows):
        if isinstance(row, dict):
            yield f"{name}[{number}]", row
        else:
            broken = Broken(f"each row must be a JSON object, found {_kind_with_command(row, file, selection)}")
            yield f"{name}[{number}]", broken


def _json_value(raw: bytes, file: DataFile) -> object:
    """Return the parsed value; None for JSON Lines with the wrong extension, where a second value follows."""
    text, name = "", file.name
    try:
        text = raw.decode("utf-8-sig")
        return json.loads(text, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(f"{name}:{line}: not UTF-8; {file.as_utf8()}") from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            return None
        problem = error.msg if text[: error.pos].strip() else _NO_ARRAY
        raise DataError(f"{name}:{error.lineno}: column {error.colno}: not valid JSON: {problem}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}: not valid JSON: {_unreadable_json(error)}") from error


def _array(value: object, file: DataFile) -> tuple[str, list[Any]]:
    """Return the jq selection and the rows: an array, the only array in an object, or one object.

    A single object is a row if it has texts or a conversation.
    """
    if isinstance(value, list):
        return ".[]", value
    if not isinstance(value, dict):
        raise DataError(f"{file.name}: {_NO_ARRAY}")
    arrays = {name: inner for name, inner in value.items() if isinstance(inner, list)}
    firsts = [inner[0].keys() for inner in arrays.values() if inner and isinstance(inner[0], dict)]
    has_texts = not arrays and any(isinstance(inner, str) for inner in value.values())
    is_talk = any({"role", "content"} <= keys or {"from", "value"} <= keys for keys in firsts)
    if has_texts or is_talk or "input_ids" in value:
        return ".", [value]
    if not arrays and value and all(isinstance(inner, dict) for inner in value.values()):
        raise DataError(
            f"{file.name}: expected an array of rows, found an object of {len(value):,} objects; type: {file.jq('.[]')}"
        )
    if len(arrays) != 1:
        raise DataError(f"{file.name}: expected one list of rows, {_lists_with_command(arrays, file)}")
    [(name, rows)] = arrays.items()
    return f".[{json.dumps(name)}][]", rows


def _lists_with_command(arrays: Mapping[str, list[Any]], file: DataFile) -> str:
    """Return the lists of an object, with the command that converts one list, or columns, to rows."""
    lists = f"found {len(arrays)}{': ' if arrays else ''}{listed([*map(escaped, arrays)])}"
    names = [*map(json.dumps, arrays)]
    if not arrays:
        return lists
    if all(isinstance(row, dict) for rows in arrays.values() for row in rows):
        return f"{lists}. To read the first, type: {file.jq(f'.[{names[0]}][]')}"
    if len({*map(len, arrays.values())}) == 1:
        row = ", ".join(f"({name}): .[{name}][$row]" for name in names)
        return f"{lists}. If they are columns, type: {file.jq(f'range(.[{names[0]}] | length) as $row | {{{row}}}')}"
    return f"{lists}, of different lengths"


def _read_text(stream: BinaryIO, file: DataFile) -> Iterator[Located]:
    """Yield the file as one document; a file that is not text is one bad row."""
    name = file.name
    raw = _read_whole(
        stream,
        _MAX_TEXT_BYTES,
        f"{name}: a text file is one document of at most 1 GB; split it into files, or into JSON Lines rows,"
        ' {"text": "..."}',
    )
    try:
        yield name, {TEXT_COLUMN: raw.decode().removeprefix("\ufeff")}
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        yield name, Broken(f"not UTF-8 at byte {error.start + 1}, in line {line}; {file.as_utf8()}")


def _read_whole(stream: BinaryIO, max_bytes: int, problem: str) -> bytes:
    """Return all bytes; DataError if there are more than `max_bytes`."""
    raw = b"".join(islice(iter(partial(stream.read, _BLOCK_BYTES), b""), max_bytes // _BLOCK_BYTES + 1))
    if len(raw) > max_bytes:
        raise DataError(problem)
    return raw


def _read_table(stream: BinaryIO, file: DataFile, batches: Callable[[BinaryIO], Iterator[Any]]) -> Iterator[Located]:
    import pyarrow  # slow to import, and only needed here

    row, features = 0, None
    try:
        for batch in batches(stream):
            batch.validate(full=True)  # offsets of a damaged file could point outside its memory
            features = _features(batch.schema) if features is None else features
            for record in named_tags(features, batch.to_pylist()):
                yield f"{file.name} row {row}", record
                row += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # damaged pages are an OSError
        reason = escaped(str(error))
        raise DataError(f"{file.name}: cannot be read as a table, from row {row} on: {reason}") from error


def _features(schema: Any) -> Mapping[str, Any]:
    """Return the features that `datasets` stored in a file, if they have class names."""
    if b"ClassLabel" not in (schema.metadata or {}).get(b"huggingface", b""):
        return {}
    from datasets import Features  # slow to import

    try:
        return dict(Features.from_arrow_schema(schema))
    except (ValueError, KeyError, TypeError):  # from another version of `datasets`
        return {}


def named_tags(features: Mapping[str, Any], rows: Iterable[Row]) -> Iterator[Row]:
    """Yield rows of `datasets` with class names in lists of class IDs: B-PER instead of 1."""
    elements: dict[str, Any] = {name: getattr(feature, "feature", None) for name, feature in features.items()}
    classes = {name: dict(enumerate(element.names)) for name, element in elements.items() if hasattr(element, "names")}
    for row in rows:
        tags = {
            name: None if row[name] is None else [names.get(tag, tag) for tag in row[name]]  # -1 has no name
            for name, names in classes.items()
        }
        yield {**row, **tags}


def _parquet_batches(stream: BinaryIO) -> Iterator[Any]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(stream, page_checksum_verification=True)
    yield from file.iter_batches(_TABLE_BATCH_ROWS)


def _arrow_batches(stream: BinaryIO) -> Iterator[Any]:
    """Yield batches of an Arrow file (also Feather), or of an Arrow stream, as in the `datasets` cache."""
    import pyarrow

    start = stream.read(len(_ARROW_FILE))
    stream.seek(0)
    if start == _ARROW_FILE:
        file = pyarrow.ipc.open_file(stream)
        batches = (file.get_batch(number) for number in range(file.num_record_batches))
    else:
        batches = iter(pyarrow.ipc.open_stream(stream))
    for batch in batches:
        yield from (batch.slice(at, _TABLE_BATCH_ROWS) for at in range(0, len(batch), _TABLE_BATCH_ROWS))


def require_prose(file: DataFile, text: str) -> None:
    """Raise DataError if the first lines of a text file are rows, with commands for both interpretations."""
    lines = [line for line in text[: 1 << 16].split("\n")[:_INSPECTED_LINES] if line.strip()]
    if len(lines) < _MIN_LINES:
        return
    if all(_is_object(line) for line in lines[:-1]):  # the last may be truncated
        what, program, fmt = "lines are JSON objects", "cat", "auto"
    elif program := _program_of_tags([line.split() for line in lines]):
        what, fmt = "lines are words with their tags", "tagged_words"
    else:
        return
    as_rows, as_text = (
        f"{file.converted(converter, '.jsonl')} && {check_of_converted(file, name)}"
        for converter, name in ((program, fmt), ("jq -Rsc '{text: .}'", "text"))
    )
    raise DataError(
        f"{file.name}: its {what}, which would be trained as one plain text. To read them as rows, type: {as_rows}\n"
        f"    To train them as plain text, type: {as_text}"
    )


def _is_object(line: str) -> bool:
    if not line.lstrip().startswith("{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _program_of_tags(lines: Sequence[Sequence[str]]) -> str:
    """Return the program that converts CoNLL lines to rows; empty for other lines."""
    counts = [len(fields) for fields in lines]
    count = max(counts, key=counts.count)
    rows = [fields for fields in lines if len(fields) == count]
    if count < 2 or 2 * len(rows) < len(lines) or not all(_TAG.fullmatch(fields[-1]) for fields in rows):
        return ""
    is_numbered = all(fields[0].isdecimal() for fields in rows)
    is_nested = is_numbered and count > 2  # GermEval tags, followed by nested ones
    if not any("-" in fields[2 if is_nested else -1] for fields in rows):
        return ""
    word, tag = "$2" if is_numbered else "$1", "$3" if is_nested else "$NF"
    return awk_of_tagged_words(f'NF == {count} && {word} != "-DOCSTART-"', word, tag)


READERS: dict[str, Callable[[Any, DataFile], Iterator[Located]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": partial(read_csv, delimiter=","),
    ".tsv": partial(read_csv, delimiter="\t"),
    ".parquet": partial(_read_table, batches=_parquet_batches),
    ".arrow": partial(_read_table, batches=_arrow_batches),
    ".feather": partial(_read_table, batches=_arrow_batches),
    **dict.fromkeys(TEXT_FILES, _read_text),
}
