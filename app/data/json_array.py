"""A JSON file as rows with line numbers, which `json.load` would lose; no more of it in memory than a row needs."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import BinaryIO

from app.errors import DataError

_blank = re.compile(r"[ \t\r\n]*")
_decode = json.JSONDecoder().raw_decode
_BLOCK = 1 << 20  # bytes that are read at once; of a longer row as many as are there already
_SPLIT = 16  # characters at the end that may be the beginning of a longer word, number or escape

_NO_KEY = "Expecting property name enclosed in double quotes"

Placed = tuple[str, object]  # the line that a row begins in, and what is there


def read_json(stream: BinaryIO, name: str) -> Iterator[Placed] | None:
    """The rows of an array, or of an object's only array; None if another value follows the first."""
    text = _Text(stream, name)
    start = text.peek()
    if start == "[":
        return _only(_elements(text), text)
    if start != "{":
        raise text.malformed("expected an array of rows, or an object that holds one")
    arrays = [key for key, is_array in _members(text) if is_array]
    if text.peek():
        return None
    if len(arrays) != 1:
        raise DataError(
            f"{name}: expected an array of rows, or an object with exactly one; arrays found:"
            f" {', '.join(arrays) or 'none'}"
        )
    stream.seek(0)
    again = _Text(stream, name)
    again.peek()
    next(key for key, is_array in _members(again) if is_array)  # now stands before the array
    return _elements(again)


def _only(rows: Iterator[Placed], text: "_Text") -> Iterator[Placed]:
    yield from rows
    if text.peek():
        raise text.malformed("expected nothing after the array")


def _members(text: "_Text") -> Iterator[tuple[str, bool]]:
    """Each key of an object, and whether its value is an array; the value is read when the next one is asked for."""
    text.take()
    while text.peek() != "}":
        key = _key(text)
        is_array = text.peek() == "["
        yield key, is_array
        if is_array:
            for _row in _elements(text):
                pass
        else:
            text.value()
        if text.peek() == "}":
            break
        if text.peek() != ",":
            raise text.malformed("Expecting ',' delimiter")
        text.take()
        if text.peek() == "}":
            raise text.malformed(_NO_KEY)
    text.take()


def _key(text: "_Text") -> str:
    if text.peek() != '"':
        raise text.malformed(_NO_KEY)
    key = str(text.value())
    if text.peek() != ":":
        raise text.malformed("Expecting ':' delimiter")
    text.take()
    return key


def _elements(text: "_Text") -> Iterator[Placed]:
    text.take()
    while text.peek() != "]":
        place = f"{text.name}:{text.line()}"
        yield place, text.value()
        if text.peek() == ",":
            text.take()
        elif text.peek() != "]":
            raise text.malformed("expected ',' or ']' after a row")
    text.take()


class _Text:
    """JSON that is read on as it is needed, and left behind."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self.name = name
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self._ended = "", 0, False
        self._lines = (
            1  # of the file before `_counted`, and the characters of the last of them before `_text`
        )
        self._counted = self._before = 0

    def peek(self) -> str:
        """The next character that is no white space; nothing at the end."""
        while True:
            found = _blank.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read_on()

    def take(self) -> None:
        """Go past the character that was peeked at."""
        self._at += 1

    def line(self) -> int:
        """Where the next character stands."""
        self._lines += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._lines

    def value(self) -> object:
        """The next value, read to its end."""
        self.peek()
        while True:
            try:
                value, end = _decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended or not self._may_go_on(error):
                    raise self.malformed(error.msg, error.pos) from error
            except (ValueError, RecursionError) as error:
                raise self.malformed(beyond_reading(error)) from error
            else:
                if self._ended or self._text[end - 1] in '}]"' or end <= len(self._text) - _SPLIT:
                    self._at = end
                    return value
            self._read_on()

    def malformed(self, expected: str, at: int | None = None) -> DataError:
        """What to raise about the next character, or another one."""
        at = self._at if at is None else at
        line = self.line() + self._text.count("\n", self._at, at)
        begin = self._text.rfind("\n", 0, at)
        column = at - begin if begin >= 0 else self._before + at + 1
        return DataError(f"{self.name}:{line}: column {column}: not valid JSON: {expected}")

    def _may_go_on(self, error: json.JSONDecodeError) -> bool:
        """Whether what is wrong may be that the rest has not been read yet."""
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _SPLIT

    def _read_on(self) -> None:
        """More behind what is left; each time as much again, so that a long row is not parsed too often."""
        lines, gone = self.line(), self._text.rfind("\n", 0, self._at)
        self._before = self._at - gone - 1 if gone >= 0 else self._before + self._at
        self._text = self._text[self._at :]
        self._at = self._counted = 0
        block = self._stream.read(max(_BLOCK, len(self._text)))
        try:
            self._text += self._decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            line = lines + self._text.count("\n") + error.object.count(b"\n", 0, error.start)
            raise DataError(f"{self.name}:{line}: not UTF-8; save the file as UTF-8") from error
        self._ended = not block


def beyond_reading(error: ValueError | RecursionError) -> str:
    """Why valid JSON cannot be read all the same."""
    if isinstance(error, RecursionError):
        return "lists or objects in it are nested too deeply"
    return "holds a number of more than 4,300 digits; if it is none, put it in quotes"
