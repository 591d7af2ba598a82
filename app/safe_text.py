"""Text for people and files: without secrets, and without characters that control a terminal."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"

_SECRET_WORD = r"(?:token|(?:api)?key|secret|pass(?:word|wd|phrase)?|pat|credentials?)"
_SECRET_NAME = re.compile(rf"(?:^|[^a-z0-9]|pg){_SECRET_WORD}(?:_\d+)?$", re.IGNORECASE)
_HARMLESS_NAME = re.compile(r"(?:cache_key|(?:bos|eos|pad|unk|sep|cls|mask|image|video|audio)_token)$", re.IGNORECASE)
_OVERRIDE = re.compile(r"^([+~-]*[\w./@-]+)=(.+)$", re.DOTALL)
_SHAPES = (
    (re.compile(r"\bhf_[A-Za-z0-9]{20,}"), MASK),
    (re.compile(r"(://)[^/\s@]+@"), rf"\1{MASK}@"),
    (re.compile(rf"([?&](?:[\w-]*[_-])?(?:{_SECRET_WORD}|sig|signature)=)[^&#\s'\"]+", re.IGNORECASE), rf"\1{MASK}"),
)
# the controls of a terminal, and those that turn the direction of the text after them
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_MIN_SECRET_LENGTH = 8  # a shorter value may occur in harmless texts


def redact(value: Any) -> Any:
    """A copy of a structure with values of secret keys, and secrets inside texts, replaced by `***`."""
    if isinstance(value, Mapping):
        return {key: _redact_value(str(key), inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    if not isinstance(value, str):
        return value
    override = _OVERRIDE.match(value)
    return redact_text(f"{override[1]}={_redact_value(override[1], override[2])}" if override else value)


def redact_text(text: str) -> str:
    """Replace secrets of the environment, and texts that look like tokens or passwords."""
    values = {value for name, value in os.environ.items() if _is_secret(name) and len(value) >= _MIN_SECRET_LENGTH}
    for secret in sorted(values, key=len, reverse=True):  # so that no part of a longer one remains
        text = text.replace(secret, MASK)
    for shape, replacement in _SHAPES:
        text = shape.sub(replacement, text)
    return text


def printable(text: str) -> str:
    """Replace the control characters by which a text of others could rewrite the screen."""
    return _CONTROL_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", text)


def safe_text(text: str) -> str:
    """Text for a terminal or a log."""
    return printable(redact_text(text))


def many(number: int, noun: str) -> str:
    """A count with its noun."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(names: Sequence[str], most: int = 12) -> str:
    """Join the first names of a list."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def _redact_value(name: str, value: Any) -> Any:
    return MASK if isinstance(value, str) and value and _is_secret(name) else redact(value)


def _is_secret(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _HARMLESS_NAME.search(name)
