"""A JSON file as rows with line numbers, which `json.load` would lose."""

import json
import re
from collections.abc import Iterator

from app.errors import DataError

_blank = re.compile(r"[ \t\r\n]*")
_decode = json.JSONDecoder().raw_decode


def read_json(text: str, name: str) -> Iterator[tuple[str, object]] | None:
    """The rows of an array, or of an object's only array; None if another value follows the first."""
    start = _skip(text, 0)
    if text[start : start + 1] == "[":
        return _elements(text, start, name, last=True)
    if text[start : start + 1] != "{":
        raise _malformed(text, start, name, "expected an array of rows, or an object that holds one")
    _, end = _value(text, start, name)
    if _skip(text, end) < len(text):
        return None
    return _elements(text, _only_array(text, start, name), name, last=False)


def _only_array(text: str, start: int, name: str) -> int:
    """Where the object's only array begins."""
    arrays = [(key, at) for key, at in _members(text, start, name) if text[at] == "["]
    if len(arrays) != 1:
        found = ", ".join(key for key, _ in arrays) or "none"
        raise DataError(
            f"{name}: expected an array of rows, or an object with exactly one; arrays found: {found}"
        )
    return arrays[0][1]


def _members(text: str, start: int, name: str) -> Iterator[tuple[str, int]]:
    """Key and position of each value of an object that is known to be valid JSON."""
    at = _skip(text, start + 1)
    while text[at] != "}":
        key, at = _value(text, at, name)
        at = _skip(text, _skip(text, at) + 1)  # over the colon
        yield str(key), at
        _, at = _value(text, at, name)
        at = _skip(text, at)
        at = _skip(text, at + 1) if text[at] == "," else at


def _elements(text: str, start: int, name: str, *, last: bool) -> Iterator[tuple[str, object]]:
    line, counted = 1, 0
    at = _skip(text, start + 1)
    while text[at : at + 1] != "]":
        line += text.count("\n", counted, at)
        counted = at
        value, at = _value(text, at, name)
        yield f"{name}:{line}", value
        at = _skip(text, at)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
        elif text[at : at + 1] != "]":
            raise _malformed(text, at, name, "expected ',' or ']' after a row")
    if last and _skip(text, at + 1) < len(text):
        raise _malformed(text, _skip(text, at + 1), name, "expected nothing after the array")


def _skip(text: str, at: int) -> int:
    found = _blank.match(text, at)
    return found.end() if found else at


def _value(text: str, at: int, name: str) -> tuple[object, int]:
    try:
        return _decode(text, at)
    except json.JSONDecodeError as error:
        raise _malformed(text, error.pos, name, error.msg) from error
    except (ValueError, RecursionError) as error:
        raise _malformed(text, at, name, beyond_reading(error)) from error


def beyond_reading(error: ValueError | RecursionError) -> str:
    """Why valid JSON cannot be read all the same."""
    if isinstance(error, RecursionError):
        return "lists or objects in it are nested too deeply"
    return "holds a number of more than 4,300 digits; if it is none, put it in quotes"


def _malformed(text: str, at: int, name: str, expected: str) -> DataError:
    line = text.count("\n", 0, at) + 1
    column = at - text.rfind("\n", 0, at)
    return DataError(f"{name}:{line}: column {column}: not valid JSON: {expected}")
