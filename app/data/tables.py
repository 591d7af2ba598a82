"""Rows of CSV and Parquet, each with its place."""

import contextlib
import csv
import gzip
import io
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from app.data.decoding import nul_in, printable
from app.data.shapes import Broken, Located
from app.errors import DataError

_RECORDS = 256  # of a Parquet file in memory at once


def read_csv(stream: BinaryIO, name: str, delimiter: str) -> Iterator[Located]:
    """One row for each record after the first; its place is the line that it begins in."""
    csv.field_size_limit(sys.maxsize)  # a long answer is no mistake; the default stops at 131072 characters
    # A byte that is not UTF-8 makes its own row a bad one: a decoder that stops at it is thousands of lines ahead.
    with io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="") as lines:
        yield from _records(lines, name, delimiter)


def _records(lines: Iterable[str], name: str, delimiter: str) -> Iterator[Located]:
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        place = f"{name}:{reader.line_num + 1}"
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise DataError(f"{place}: cannot be read as CSV: {_what_is_wrong(error)}") from error
        if fields is None:
            return
        if not fields:  # blank lines are no rows
            continue
        if header:
            yield place, _record(header, fields)
        else:
            header = _header(fields, place)


def _what_is_wrong(error: csv.Error) -> str:
    if "unexpected end of data" in str(error):
        return 'a quote (") that opens in this row is never closed; close it, or write a quote inside a field as two'
    return f"{error}; a field with quotes stands in quotes, and each quote inside it is written as two"


def _header(fields: list[str], place: str) -> list[str]:
    problem = _no_text(fields)
    if problem or len(set(fields)) < len(fields):
        found = problem or f"found {fields}"
        raise DataError(f"{place}: the first line must name the columns, each once; {found}")
    return fields


def _record(header: list[str], fields: list[str]) -> dict[str, object] | Broken:
    if len(fields) != len(header):
        return Broken(
            f"has {len(fields)} field{'s' * (len(fields) != 1)} where the first line names {len(header)} columns"
        )
    problem = _no_text(fields)
    return Broken(problem) if problem else dict(zip(header, fields, strict=True))


def _no_text(fields: list[str]) -> str:
    """Why a record is not text; empty if it is."""
    for field in fields:
        if not field.isascii():
            try:
                field.encode()
            except UnicodeEncodeError as error:
                byte = ord(error.object[error.start]) - 0xDC00
                return f"not UTF-8 (the byte 0x{byte:02x}); save the file as UTF-8"
        if "\0" in field:
            return nul_in(field)
    return ""


def read_parquet(stream: BinaryIO, name: str) -> Iterator[Located]:
    """Rows are counted from 0."""
    import pyarrow  # slow to import, and only needed here
    import pyarrow.parquet

    row = 0
    with _seekable(stream) as opened:
        try:
            file = pyarrow.parquet.ParquetFile(opened, page_checksum_verification=True)
            for batch in file.iter_batches(_RECORDS):
                for record in _plain(batch):
                    yield f"{name} row {row}", record
                    row += 1
        except (pyarrow.ArrowException, OSError) as error:  # damaged pages are an OSError
            reason = printable(str(error))
            raise DataError(f"{name}: cannot be read as Parquet, from row {row} on: {reason}") from error


def _plain(batch: Any) -> list[Any]:
    """The records of a batch; alone, one that is not text can be told from the others."""
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError as error:
        if len(batch) == 1:
            return [Broken(f"a text in it is not UTF-8 (the byte 0x{error.object[error.start]:02x})")]
        return [record for row in range(len(batch)) for record in _plain(batch.slice(row, 1))]


@contextlib.contextmanager
def _seekable(stream: BinaryIO) -> Iterator[BinaryIO]:
    """Parquet is read from its end, which gzip reaches only by unpacking all: on the disk, not in memory."""
    if not (isinstance(stream, io.BufferedReader) and isinstance(stream.raw, gzip.GzipFile)):
        yield stream
        return
    with tempfile.TemporaryFile() as unpacked:
        shutil.copyfileobj(stream, unpacked)
        yield unpacked
