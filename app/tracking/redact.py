"""Keeping secrets out of everything that is written."""

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"

_SECRET_NAME = re.compile(
    r"(?:^|[^a-z0-9])(?:token|(?:api)?key|secret|password|passwd|credentials?)$", re.IGNORECASE
)
_HARMLESS_NAME = re.compile(
    r"(?:cache_key|(?:bos|eos|pad|unk|sep|cls|mask|image|video|audio)_token)$", re.IGNORECASE
)
_OVERRIDE = re.compile(r"^([+~-]*[\w./@-]+)=(.+)$", re.DOTALL)
_SHAPES = (
    (re.compile(r"\bhf_[A-Za-z0-9]{20,}"), MASK),
    (re.compile(r"(://)[^/\s@]+@"), rf"\1{MASK}@"),
)
_SHORTEST = 8  # a shorter value would be found in harmless places


def masked(value: Any) -> Any:
    """The same structure; what a secret's name stands before is masked, and secrets in texts are."""
    if isinstance(value, Mapping):
        return {key: _under(str(key), inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item) for item in value]
    if not isinstance(value, str):
        return value
    override = _OVERRIDE.match(value)
    return masked_text(f"{override[1]}={_under(override[1], override[2])}" if override else value)


def masked_text(text: str) -> str:
    """Without the secrets of the environment, and without what looks like one."""
    for secret in _secrets_of_environment():
        text = text.replace(secret, MASK)
    for shape, replacement in _SHAPES:
        text = shape.sub(replacement, text)
    return text


def _under(name: str, value: Any) -> Any:
    return MASK if isinstance(value, str) and value and _is_secret(name) else masked(value)


def _is_secret(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _HARMLESS_NAME.search(name)


def _secrets_of_environment() -> list[str]:
    """Longest first, so that no part of one is left."""
    values = {value for name, value in os.environ.items() if _is_secret(name) and len(value) >= _SHORTEST}
    return sorted(values, key=len, reverse=True)
