"""A file of text: one document, in pieces where it is long."""

import codecs
from collections.abc import Iterator
from typing import BinaryIO

from app.data.decoding import LOOK, nul_in, other_encoding
from app.data.pieces import PIECE, pieces
from app.data.shapes import Broken, Located, Piece
from app.errors import DataError

TEXT_COLUMN = "text"
_BLOCK = 1 << 20  # bytes
_MARK = "\ufeff"


class _NoText(Exception):  # noqa: N818 (caught where it is known what became of the file)
    """The message says what is wrong with the bytes."""


def read_text(stream: BinaryIO, name: str) -> Iterator[Located]:
    """One row, or one for each piece; of a file that is not text nothing is taken, wherever the damage is."""
    try:
        length, start, is_blank = _looked_through(stream)
    except _NoText as problem:
        yield name, Broken(str(problem))
        return
    if length <= PIECE:
        yield name, {TEXT_COLUMN: start}
    elif is_blank:
        yield name, Broken("it holds nothing but white space")
    else:
        stream.seek(0)
        yield from _in_pieces(stream, name)


def _looked_through(stream: BinaryIO) -> tuple[int, str, bool]:
    """How many characters there are, those of the first piece at least, and whether all of them are white space."""
    length, start, is_blank = 0, "", True
    for block in _decoded(stream):
        start += block if length <= PIECE else ""
        length += len(block)
        is_blank = is_blank and not block.strip()
    return length, start, is_blank


def _in_pieces(stream: BinaryIO, name: str) -> Iterator[Located]:
    first = True
    try:
        for text, last in pieces(_decoded(stream)):
            yield name, Piece(TEXT_COLUMN, text, first=first, last=last)
            first = False
    except _NoText as problem:  # a moment ago it was text
        raise DataError(f"{name}: it was changed while it was read: {problem}") from problem


def _decoded(stream: BinaryIO) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    read, lines, is_start = 0, 1, True
    while True:
        block = stream.read(_BLOCK)
        problem = (read == 0 and other_encoding(block[:LOOK])) or nul_in(block, read)
        if problem:
            raise _NoText(problem)
        waiting = len(decoder.getstate()[0])  # bytes of a character that the last block ended in
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            line = lines + error.object.count(b"\n", 0, error.start)
            where = f"byte {read - waiting + error.start + 1}, in line {line}"
            raise _NoText(f"not UTF-8 at {where}; save the file as UTF-8") from error
        if text:
            yield text.removeprefix(_MARK) if is_start else text
            is_start = False
        if not block:
            return
        read += len(block)
        lines += block.count(b"\n")
