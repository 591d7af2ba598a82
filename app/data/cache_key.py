"""What decides the token rows of a source, as one key of the cache: content, tokenizer, settings, code."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from app.data.readers import open_file
from app.data.tokenizer import Tokenizer

CODE_VERSION = 2  # raise it with every change of what rows become; a test of rows of all formats says when
_EDGE = 1 << 20  # bytes


def cache_key(content: str, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> str:
    """The same on every machine and for every path and cache folder."""
    parts = {
        "content": content,
        "settings": dict(settings),
        "tokenizer": _sha256(tokenizer.backend_tokenizer.to_str()),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "template": tokenizer.chat_template,
        "code": [CODE_VERSION, *(version(package) for package in ("tokenizers", "transformers"))],
    }
    return _sha256(json.dumps(parts, sort_keys=True))[:32]


def files_hash(files: Iterable[tuple[Path, str]]) -> str:
    """Of the name that each file goes by, its size, the time of its last write, its first and its last megabyte."""
    digest = hashlib.sha256()
    for path, name in files:
        with open_file(path) as stream:
            found = os.fstat(stream.fileno())
            digest.update(f"{name}\0{found.st_size} {found.st_mtime_ns}\n".encode())
            digest.update(stream.read(_EDGE))
            stream.seek(max(0, found.st_size - _EDGE))
            digest.update(stream.read(_EDGE))
    return digest.hexdigest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
