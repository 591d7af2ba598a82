"""One Arrow file of token rows for each cache key: written aside, synced and renamed, then mapped into memory.

A file is there whole or not at all: its footer, and the numbers of rows and tokens, are written last. Of several
processes that need the same rows one prepares them, and the others log that they wait.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from app.data.token_dataset import SCHEMA, ColumnValues, RecordBatchView, TokenRows, as_columns, record_batch
from app.data.tokenizer import Tokenizer, Tokens
from app.errors import EnvironmentProblem
from app.files import fsync

CODE_VERSION = 12  # raise it with every change of what rows become; a test of rows of all formats says when
BATCH_ROWS = 4096  # of one record batch
_BATCH_TOKENS = 1 << 22  # fewer rows if they are long
_ABANDONED_SECONDS = 24 * 3600  # after which a half-written file is removed without a lock
_META_KEY = "rows"

Facts = dict[str, Any]  # counts of the rows, as JSON
log = logging.getLogger(__name__)


def cached_rows(cache_dir: str, key: str, write: "Callable[[RowWriter], Facts]") -> tuple[TokenRows, Facts]:
    """The rows of `key` and the facts stored with them; `write` makes both if they are not there."""
    path = Path(cache_dir).expanduser() / "tokens" / f"{key}.arrow"
    found = open_rows(path)
    if found is None:
        with _lock(path, cache_dir) as locked:
            found = open_rows(path)  # another process may have made it while this one waited
            if found is None:
                _remove_abandoned(path, locked=locked)
                _make(path, cache_dir, write)
                found = open_rows(path)
    if found is None:
        raise EnvironmentProblem(
            f"cache_dir={cache_dir}: what was just written there reads back differently;"
            " set cache_dir to a folder on another disk"
        )
    return found


def open_rows(path: Path) -> tuple[TokenRows, Facts] | None:
    """Map the file of a RowWriter; None if it is not there or not whole."""
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        if reader.schema != SCHEMA:  # of another version
            return None
        last = reader.num_record_batches - 1
        meta = json.loads(reader.get_batch_with_custom_metadata(last).custom_metadata[_META_KEY])
        rows = TokenRows(*(RecordBatchView(reader.get_batch(number)) for number in range(last)))
        tokens = int(rows.lengths.sum(dtype=np.int64))
        return (rows, meta["facts"]) if (len(rows), tokens) == (meta["rows"], meta["tokens"]) else None
    except (OSError, ValueError, KeyError, TypeError):  # ArrowInvalid is a ValueError
        return None


@contextlib.contextmanager
def _explain_disk_errors(cache_dir: str) -> Iterator[None]:
    """Turn a full disk, or a folder that may not be written to, into an error that the user can mend."""
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(
            f"cache_dir={cache_dir}: cannot write the token cache: {error.strerror}; make room there, or set"
            " cache_dir to another folder"
        ) from error


class RowWriter:
    """Writes rows in record batches, so that memory does not grow with their number."""

    def __init__(self, path: Path, cache_dir: str) -> None:
        self._cache_dir = cache_dir
        self._pending: list[ColumnValues] = []  # of the next batch
        self._pending_tokens = 0
        self._rows = self._tokens = 0
        with _explain_disk_errors(cache_dir):
            self._file = path.open("wb")
            self._writer = pa.ipc.new_file(self._file, SCHEMA)

    def add(self, location: str, sample: Tokens, split_hash: int) -> None:
        self._pending.append(as_columns(location, sample, split_hash))
        self._pending_tokens += len(sample.ids)
        if len(self._pending) >= BATCH_ROWS or self._pending_tokens >= _BATCH_TOKENS:
            self._write_pending()

    def finish(self, facts: Facts) -> None:
        """Write the rest; on return everything is on the disk."""
        if self._pending:
            self._write_pending()
        meta = json.dumps({"rows": self._rows, "tokens": self._tokens, "facts": facts})
        with _explain_disk_errors(self._cache_dir):
            self._writer.write_batch(pa.RecordBatch.from_pylist([], SCHEMA), custom_metadata={_META_KEY: meta})
            self._writer.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def _write_pending(self) -> None:
        batch = record_batch(self._pending)
        with _explain_disk_errors(self._cache_dir):
            self._writer.write_batch(batch)
        self._rows, self._tokens = self._rows + len(self._pending), self._tokens + self._pending_tokens
        self._pending, self._pending_tokens = [], 0


@contextlib.contextmanager
def _lock(path: Path, cache_dir: str) -> Iterator[bool]:
    """Let one process at a time make a file. False where a file system has no locks: then all make equal files."""
    with _explain_disk_errors(cache_dir):
        lock_path = path.parent.with_name("locks") / path.stem
        for folder in (lock_path.parent, path.parent):
            folder.mkdir(parents=True, exist_ok=True)
        lock = lock_path.open("wb")
    with lock:
        is_locked = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("cache_dir=%s: another process is preparing the same rows; waiting for it", cache_dir)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            is_locked = False
        yield is_locked


def _make(path: Path, cache_dir: str, write: Callable[[RowWriter], Facts]) -> None:
    part = path.with_name(f"{path.stem}.{uuid.uuid4().hex[:12]}.part")
    writer = RowWriter(part, cache_dir)
    try:
        writer.finish(write(writer))
        with _explain_disk_errors(cache_dir):
            part.replace(path)
            fsync(path.parent)
    finally:
        writer.abandon()
        part.unlink(missing_ok=True)


def _remove_abandoned(path: Path, *, locked: bool) -> None:
    """Remove what killed writers left: of this file at once where the lock says that they are dead."""
    for part in path.parent.glob("*.part"):
        with contextlib.suppress(OSError):
            is_dead = locked and part.name.startswith(f"{path.stem}.")
            if is_dead or time.time() - part.stat().st_mtime > _ABANDONED_SECONDS:
                part.unlink()


def cache_key(content: str, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> str:
    """Hash content, tokenizer, settings and code; paths and machines do not matter."""
    parts = {
        "content": content,
        "settings": dict(settings),
        "tokenizer": _sha256(tokenizer.backend_tokenizer.to_str()),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "template": tokenizer.chat_template,
        "code": [CODE_VERSION, *(version(package) for package in ("tokenizers", "transformers"))],
    }
    return _sha256(json.dumps(parts, sort_keys=True))[:32]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
