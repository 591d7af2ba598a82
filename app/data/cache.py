"""Token rows under a name made of everything that decided them, so that nothing is tokenised twice.

An entry is written aside, synced and renamed, so it is there whole or not at all. When it is opened, its files must
have the signatures that they had, else their content is verified, and the entry made again if that fails. Of several
processes that need the same entry one makes it, and the others say that they wait. What a killed one left is cleared
away by the next that makes an entry.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import platform
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

from app.data.rows import TokenRows
from app.data.storage import RowWriter, Told, disk_explained, open_rows
from app.data.tokenizer import Tokenizer
from app.errors import EnvironmentProblem

CODE_VERSION = 1  # raise it when a library or the file format changes what an entry means
# modules whose text is a part of every key: a change there may change tokens, places, counts
DECIDING = (
    "bad_rows",
    "crew",
    "decoding",
    "encoding",
    "files",
    "formats/chats",
    "formats/columns",
    "formats/conversation",
    "formats/documents",
    "formats/labelled",
    "formats/questions",
    "formats/table",
    "formats/tools",
    "formats/unfold",
    "hub",
    "json_array",
    "making",
    "overflow",
    "pieces",
    "rendering",
    "report",
    "rows",
    "script",
    "shapes",
    "signatures",
    "skeleton",
    "sources",
    "storage",
    "stream",
    "tables",
    "text_file",
    "tokenizer",
)
_ABANDONED = 24 * 3600  # seconds until a half-written entry belongs to nobody, where no lock says so before
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY)
_HERE = hashlib.sha256(platform.node().encode()).hexdigest()[:8]  # this machine
log = logging.getLogger(__name__)


def cache_key(content: str, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> str:
    """A hash of the rows' content, the tokenizer, its template, the settings and the code."""
    parts = {
        "content": content,
        "settings": dict(settings),
        "tokenizer": _sha256(tokenizer.backend_tokenizer.to_str()),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "template": tokenizer.chat_template,
        "code": _code(),
    }
    return _sha256(json.dumps(parts, sort_keys=True))[:32]


def cached_rows(cache_dir: str, key: str, write: Callable[[RowWriter], Told]) -> tuple[TokenRows, Told]:
    """The rows of `key` and what was told of them; `write` makes them if they are not there."""
    entry = Path(cache_dir).expanduser() / "tokens" / key
    found = open_rows(entry)
    if found is None:
        with _alone(entry, cache_dir) as alone:
            found = open_rows(entry)  # another process may have made it while this one waited
            if found is None:
                _make(entry, cache_dir, write, alone=alone)
                found = open_rows(entry)
    if found is None:
        raise EnvironmentProblem(
            f"cache_dir={cache_dir}: what was just written there reads back differently;"
            " set cache_dir to a folder on another disk"
        )
    return found


@contextlib.contextmanager
def _alone(entry: Path, cache_dir: str) -> Iterator[bool]:
    """One process at a time makes an entry; all of them where a file system knows no locks, which only costs time."""
    with disk_explained(cache_dir):
        path = _lock_of(entry)
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("wb")
    with lock:
        yield _locked(lock, cache_dir)


def _lock_of(entry: Path) -> Path:
    return entry.parent.with_name("locks") / entry.name


def _locked(lock: BinaryIO, cache_dir: str) -> bool:
    """False where a file system knows no locks; else true, once nobody else has this one."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info("cache_dir=%s: another process is preparing the same rows; waiting for it", cache_dir)
    except OSError:
        return False
    with contextlib.suppress(OSError):  # at once, if it is ours already
        fcntl.flock(lock, fcntl.LOCK_EX)
        return True
    return False


@cache
def _code() -> str:
    here = Path(__file__).parent
    texts = [(here / f"{module}.py").read_text("utf-8") for module in DECIDING]
    versions = [version(package) for package in ("tokenizers", "transformers")]
    return _sha256(json.dumps([CODE_VERSION, *versions, *texts]))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _make(entry: Path, cache_dir: str, write: Callable[[RowWriter], Told], *, alone: bool) -> None:
    with disk_explained(cache_dir):
        entry.parent.mkdir(parents=True, exist_ok=True)
        _sweep(entry, alone=alone)
        aside = _aside(entry)
        aside.mkdir()
    try:
        with contextlib.closing(RowWriter(aside, cache_dir)) as writer:
            writer.finish(write(writer))
        with disk_explained(cache_dir):
            _put(aside, entry)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _aside(entry: Path) -> Path:
    return entry.with_name(f"{entry.name}.{_HERE}.{uuid.uuid4().hex[:12]}.part")


def _put(aside: Path, entry: Path) -> None:
    """Rename into place. Where another writer was faster, its rows, equal to ours, stay."""
    if entry.exists() and open_rows(entry) is None:
        broken = _aside(entry)
        entry.rename(broken)
        shutil.rmtree(broken)
    try:
        aside.rename(entry)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
    handle = os.open(entry.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sweep(entry: Path, *, alone: bool) -> None:
    """Remove what killed writers left."""
    for part in entry.parent.glob("*.part"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            key, _, rest = part.name.partition(".")
            # the lock of another machine may be unknown here, so only what was written on this one goes at once
            if rest.partition(".")[0] == _HERE:
                dead = alone if key == entry.name else _is_free(entry.with_name(key), held)
            else:
                dead = False
            if dead or time.time() - part.stat().st_mtime > _ABANDONED:
                shutil.rmtree(part, ignore_errors=True)


def _is_free(entry: Path, held: contextlib.ExitStack) -> bool:
    """Whether no living process makes an entry; its lock is kept until `held` ends."""
    lock = held.enter_context(_lock_of(entry).open("rb+"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
