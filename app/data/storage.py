"""The files of token rows: written in one pass, checksummed, mapped back."""

import contextlib
import errno
import hashlib
import json
import os
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from app.data.rows import ENTRY, WEIGHED, Store, TokenRows, contents_of, equal_to_earlier
from app.data.signatures import Signature, signature
from app.errors import EnvironmentProblem

_TOKENS, _TRAINED, _PLACES = "tokens.bin", "trained.bin", "places.bin"
_INDEX, _AGAIN = "index.bin", "again.bin"
_FILES = (_TOKENS, _TRAINED, _PLACES, _INDEX, _AGAIN)
_WEIGHTS = "weights.bin"  # only where there are any but 0 and 1
_META = "meta.json"
_BLOCK = 1 << 24
_TICK = 0.004  # seconds in which the times of files may not move on
_TICKS = 700  # as many make the coarsest
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Told = dict[str, Any]  # what there is to say about the rows, as JSON


@contextlib.contextmanager
def disk_explained(cache_dir: str, needed: int = 0) -> Iterator[None]:
    """A full disk, or a folder that may not be written to, as something that the user can mend."""
    try:
        yield
    except OSError as error:
        more = f"; it needs more than {needed:,} bytes" if needed and error.errno in _FULL else ""
        raise EnvironmentProblem(
            f"cache_dir={cache_dir}: cannot write the token cache: {error.strerror}{more}; make room there, or set"
            " cache_dir to another folder"
        ) from error


@dataclass(frozen=True, slots=True)
class Example:
    """What a row has in place of trained tokens: its class, and where the second side of a pair begins, or -1."""

    name: str
    second: int


class RowWriter:
    """Writes rows one after the other; memory does not grow with them."""

    def __init__(self, folder: Path, cache_dir: str) -> None:
        self._folder = folder
        self._cache_dir = cache_dir
        self._checksums = dict.fromkeys(_FILES, 0)
        self._num_rows = 0
        self._num_tokens = 0
        self._num_chars = 0
        self._num_bytes = 0
        self._largest_id = 0
        self._classes: dict[str, int] = {}  # the number of each name, as they came
        with contextlib.ExitStack() as stack, disk_explained(cache_dir):
            self._files = {name: stack.enter_context((folder / name).open("wb")) for name in _FILES}
            self._closing = stack.pop_all()

    def add(
        self,
        place: str,
        ids: NDArray[np.int32],
        trained: NDArray[np.bool_],
        side: int,
        weights: NDArray[np.float32] | None = None,
        example: Example | None = None,
    ) -> None:
        """One row; `side` is shared by the rows that must not be parted between training and evaluation."""
        shown = place.encode()
        weighed = _weighed(self._num_rows, weights)
        mask = trained if weights is None or not len(weighed) else weights
        self._num_rows += 1
        self._num_tokens += len(ids)
        self._num_chars += len(shown)
        self._largest_id = max(self._largest_id, int(ids.max(initial=0)))
        labels, meant = int(np.count_nonzero(trained)), digest(mask)
        number, second = -1, -1
        if example is not None:
            labels, meant = 1, digest(np.frombuffer(f"{example.name} {example.second}".encode(), np.uint8))
            number, second = self._classes.setdefault(example.name, len(self._classes)), example.second
        entry = (self._num_tokens, self._num_chars, labels, digest(ids), meant, side, number, second)
        self._num_bytes += ids.nbytes + trained.nbytes + len(shown) + ENTRY.itemsize + weighed.nbytes
        with disk_explained(self._cache_dir, self._num_bytes):
            self._write(_TOKENS, ids.astype("<i4", copy=False).tobytes())
            self._write(_TRAINED, trained.tobytes())
            self._write(_PLACES, shown)
            self._write(_INDEX, np.array([entry], ENTRY).tobytes())
            if len(weighed):
                self._write(_WEIGHTS, weighed.tobytes())

    def finish(self, told: Told) -> None:
        """When this returns everything is on the disk, `told` and the checksums last."""
        with disk_explained(self._cache_dir, self._num_bytes):
            self._files[_INDEX].flush()
            index = _map(self._folder / _INDEX, ENTRY)
            self._write(_AGAIN, equal_to_earlier(contents_of(index)).tobytes())
            for file in self._files.values():
                _sync_file(file)
            self.close()
            signatures = _signatures(self._folder, self._files)
            meta = self._folder / _META
            if not _later(meta, signatures):
                signatures = {}
            facts = {"checksums": self._checksums, "largest_id": self._largest_id, "told": told}
            facts["classes"] = list(self._classes)
            _write_meta(meta, {**facts, "signatures": signatures})

    def close(self) -> None:
        """Close the files, finished or not."""
        with disk_explained(self._cache_dir, self._num_bytes):
            self._closing.close()

    def _write(self, name: str, content: bytes) -> None:
        if name not in self._files:
            self._files[name] = self._closing.enter_context((self._folder / name).open("wb"))
        self._files[name].write(content)
        self._checksums[name] = zlib.crc32(content, self._checksums.get(name, 0))


def _weighed(row: int, weights: NDArray[np.float32] | None) -> NDArray[np.void]:
    """The stretches of a row whose weight is neither 0 nor 1."""
    if weights is None:
        return np.empty(0, WEIGHED)
    inner = np.flatnonzero(weights[1:] != weights[:-1]) + 1
    edges = np.concatenate([[0], inner, [len(weights)]])
    of_each = weights[edges[:-1]]
    other = np.flatnonzero((of_each != 0) & (of_each != 1))
    found = np.empty(len(other), WEIGHED)
    found["row"], found["weight"] = row, of_each[other]
    found["start"], found["stop"] = edges[other], edges[other + 1]
    return found


def digest(values: NDArray[Any]) -> int:
    """64 bits that equal values share on every machine."""
    return int.from_bytes(hashlib.blake2b(values.tobytes(), digest_size=8).digest(), "little")


def open_rows(folder: Path) -> tuple[TokenRows, Told] | None:
    """What a RowWriter finished, mapped; None if it is not there or not whole."""
    try:
        meta = json.loads((folder / _META).read_text("utf-8"))
        if not _is_whole(folder, meta):
            return None
        largest_id, told = int(meta["largest_id"]), meta["told"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    store = Store(
        tokens=_map(folder / _TOKENS, np.dtype("<i4")),
        trained=_map(folder / _TRAINED, np.dtype(np.bool_)),
        places=_map(folder / _PLACES, np.dtype("u1")),
        index=_map(folder / _INDEX, ENTRY),
        again=_map(folder / _AGAIN, np.dtype(np.bool_)),
        largest_id=largest_id,
        weighed=_map(folder / _WEIGHTS, WEIGHED) if _WEIGHTS in _names(meta) else np.empty(0, WEIGHED),
        classes=tuple(meta["classes"]),
    )
    return TokenRows(store), told


def _is_whole(folder: Path, meta: dict[str, Any]) -> bool:
    """By the signatures that its files had; if they have others, by their content, and the new ones are kept."""
    names = _names(meta)
    now = _signatures(folder, names)
    if now == meta["signatures"]:
        return True
    if any(_checksum(folder / name) != meta["checksums"][name] for name in names):
        return False
    aside = folder / f"{_META}.{uuid.uuid4().hex[:12]}"
    with contextlib.suppress(OSError):
        try:
            if _later(aside, now) and _signatures(folder, names) == now:
                _write_meta(aside, {**meta, "signatures": now})
                aside.replace(folder / _META)
        finally:
            aside.unlink(missing_ok=True)
    return True


def _names(meta: dict[str, Any]) -> list[str]:
    """The files of an entry."""
    return [*_FILES, *([_WEIGHTS] if _WEIGHTS in meta["checksums"] else [])]


def _signatures(folder: Path, names: Iterable[str]) -> dict[str, Signature]:
    return {name: signature((folder / name).stat()) for name in names}


def _later(path: Path, signatures: dict[str, Signature]) -> bool:
    """Whether the clock of the file system has moved on: what is written from now on gets other times.

    `path` is a file to see it by.
    """
    newest = max(changed for _, _, changed, _ in signatures.values())
    for _ in range(_TICKS):
        path.touch()
        if path.stat().st_ctime_ns > newest:
            return True
        time.sleep(_TICK)
    return False


def _write_meta(path: Path, facts: dict[str, Any]) -> None:
    with path.open("wb") as meta:
        meta.write(json.dumps(facts, indent=1).encode())
        _sync_file(meta)


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    if path.stat().st_size == 0:  # nothing cannot be mapped
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _sync_file(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
