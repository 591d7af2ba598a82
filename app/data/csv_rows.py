"""Rows of CSV and TSV files: which delimiter and quotes a file has, and whether its first line names the columns."""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from typing import Any

from app.data.data_file import DataFile
from app.data.types import Broken, Located, escaped
from app.errors import DataError
from app.safe_text import many

MAX_FIELD_BYTES = 64 << 20
_MAX_HEADER_BYTES = 1 << 20
_DELIMITERS = (",", ";", "\t", "|")
_INSPECTED_ROWS = 200  # compared with the first line
_MIN_PROSE_WORDS = 4  # of a field that is no name of a column
_LAST_LINE = "\0end of file\n"

Format = dict[str, Any]  # arguments of csv.reader


def read_csv(stream: io.BufferedReader, file: DataFile, delimiter: str) -> Iterator[Located]:
    """One row for each record after the first; its location is the line that it begins in. An empty cell is null."""
    csv.field_size_limit(MAX_FIELD_BYTES)  # the default stops at 131072 characters
    chosen = _format_of(file, _delimiter(stream, delimiter))
    records = _records(_lines(stream, file.name), file.name, chosen)
    number, fields = next(records, (0, []))
    if not fields:
        return
    header = _header(fields, file, number)
    first = list(islice(records, _INSPECTED_ROWS))
    _require_names(header, [fields for _, fields in first], file, chosen["delimiter"])
    for number, fields in chain(first, records):
        yield f"{file.name}:{number}", _record(header, fields, file, chosen["delimiter"])


def _delimiter(stream: io.BufferedReader, usual: str) -> str:
    """The delimiter of the first line: the usual one of such files unless only another one is there."""
    first = next(filter(bytes.strip, stream.peek(_MAX_HEADER_BYTES).splitlines()), b"").decode(errors="replace")
    counts = Counter({each: first.count(each) for each in _DELIMITERS})
    return usual if counts[usual] or not any(counts.values()) else counts.most_common(1)[0][0]


def _lines(stream: io.BufferedReader, name: str) -> Iterator[str]:
    """The lines of a file, the first of which names the columns."""
    longest = _MAX_HEADER_BYTES
    # A byte that is not UTF-8 makes only its own row bad: a strict decoder would fail thousands of lines earlier.
    with io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="") as lines:
        while line := lines.readline(longest + 1):
            if len(line) > longest:
                raise DataError(f"{name}: has a line of more than {longest >> 20} MB, which is no row of a table")
            longest = 2 * MAX_FIELD_BYTES + _MAX_HEADER_BYTES  # fields have a limit of their own
            yield line


def _records(lines: Iterable[str], name: str, chosen: Format) -> Iterator[tuple[int, list[str]]]:
    """The records that are not blank, each with the line that it begins in."""
    reader = csv.reader(lines, **chosen)
    while True:
        number = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"{name}:{number}: cannot be read as CSV: {escaped(str(error))}; a field that contains quotes must be"
                ' in quotes, with each quote inside it written as ""'
            ) from error
        if fields is None:
            return
        if fields:
            yield number, fields


@dataclass(slots=True)
class _Scan:
    """What one way to read a file makes of it."""

    widths: set[int] = field(default_factory=set)  # numbers of fields
    error: int = 0  # the line of the first record that cannot be read
    spans_lines: bool = False  # a field contains a line break
    last: list[str] = field(default_factory=list)


def _scan(file: DataFile, chosen: Format, *more: str) -> _Scan:
    found = _Scan()
    with file.opened() as stream:
        reader = csv.reader(chain(_lines(stream, file.name), more), **chosen)
        number = 0
        try:
            for fields in reader:
                found.spans_lines |= reader.line_num > number + 1
                number, found.last = reader.line_num, fields
                found.widths |= {len(fields)} if fields else set()
        except csv.Error:
            found.error = number + 1
    return found


def _format_of(file: DataFile, delimiter: str) -> Format:
    """How the file is quoted: strictly, without quotes (TSV alone), or with quotes that are not written as two."""
    strict: Format = {"delimiter": delimiter, "strict": True}
    found = _scan(file, strict)
    place = f"{file.name}:{found.error}" if found.error else file.name
    if delimiter == "\t" and (found.error or found.spans_lines):
        plain = {**strict, "quoting": csv.QUOTE_NONE}
        found_plain = _scan(file, plain)
        if len(found_plain.widths) == 1 and found_plain.widths != {1} and not found_plain.error:
            file.notes.append(
                f"{place}: quotes are read as ordinary characters because they do not enclose whole fields"
            )
            return plain
    loose = {**strict, "strict": False}
    if found.error and _scan(file, loose, _LAST_LINE).last == [_LAST_LINE.strip()]:  # else a quote is never closed
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
    """DataError if the first line is a row itself: a text in one column, in another a value that its rows have too."""
    columns = zip_longest(*rows, fillvalue="")
    again = {at for at, (name, found) in enumerate(zip(header, columns, strict=False)) if name and name in found}
    texts = {at for at, name in enumerate(header) if len(name.split()) >= _MIN_PROSE_WORDS}
    if not again or not texts or again & texts:
        return
    known = {min(again): "label", min(texts): "text"}
    names = [known.get(at, f"column{at + 1}") for at in range(len(header))]
    line = delimiter.join(names).replace("\t", "\\t")
    raise DataError(
        f"{file.name}: the first line must name the columns, and looks like a row: {header[min(texts)][:40]!r} ..."
        f" To put names before it, type: {file.with_first_line(line)}"
    )


def _record(header: list[str], fields: list[str], file: DataFile, delimiter: str) -> dict[str, Any] | Broken:
    if len(fields) != len(header):
        found = f"found {many(len(fields), 'field')}, but the first line names {many(len(header), 'column')}"
        quoted = f"; put a field that contains {delimiter!r} in double quotes" if len(fields) > len(header) else ""
        return Broken(f"{found}{quoted}")
    problem = _not_utf8(fields, file)
    # an empty cell is null, as in JSON: its row has no answer, not an empty one
    return Broken(problem) if problem else {name: each or None for name, each in zip(header, fields, strict=True)}


def _not_utf8(fields: list[str], file: DataFile) -> str:
    """The first byte that is not UTF-8; empty if there is none."""
    try:
        "".join(fields).encode()
    except UnicodeEncodeError as error:
        byte = f"0x{ord(error.object[error.start]) - 0xDC00:02x}"
        return f"not UTF-8 (the byte {byte}); {file.as_utf8()}"
    return ""
