"""Token rows in Arrow files: read as numpy views, one file per cache key.

Files are complete or absent: the footer and the numbers of rows and tokens are written last. If several processes need
the same rows, one prepares them, and the others wait and log it.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from app.data.labels import LABELINGS
from app.data.tokenizer import Tokenizer, Tokens
from app.errors import EnvironmentProblem
from app.files import fsync

# `mask_hash` hashes the loss mask, or the weights if some are neither 0 nor 1, and the label if there is one.
SCHEMA = pa.schema(
    [
        ("input_ids", pa.large_list(pa.int32())),
        ("loss_mask", pa.large_list(pa.uint8())),  # 1 or 0 for each token
        ("weights", pa.large_list(pa.float32())),  # for each token; empty if all are 0 or 1
        ("source_location", pa.string()),
        ("label", pa.string()),  # null: tokens are trained
        ("second_start", pa.int32()),  # first token of the second text of a pair, or -1
        ("num_trained", pa.int64()),
        ("label_weight", pa.float64()),  # sum over all trained tokens
        ("largest_id", pa.int32()),
        ("ids_hash", pa.uint64()),
        ("mask_hash", pa.uint64()),
        ("split_hash", pa.uint64()),  # equal for rows that must be in the same split
    ]
)
_NO_WEIGHTS = np.empty(0, np.float32)
_MASK_HASH_FACTOR = np.uint64(0xC2B2AE3D27D4EB4F)
_WHOLE_NUMBER = re.compile(r"[-+]?[0-9]{1,18}")

ColumnValues = tuple[Any, ...]  # of one row, in the order of the schema


def as_columns(location: str, sample: Tokens, split_hash: int) -> ColumnValues:
    """Return one row of the schema."""
    weights = sample.weights
    if weights is not None and np.isin(weights, (0, 1)).all():
        weights = None
    mask: NDArray[Any] = sample.loss_mask if weights is None else weights
    trained = int(np.count_nonzero(sample.loss_mask))
    if sample.label is not None:
        label = np.frombuffer(f"{sample.label} {sample.second_start}".encode(), np.uint8)
        mask, trained = (np.concatenate([mask.view(np.uint8), label]), trained) if trained else (label, 1)
    weight = float(trained) if weights is None else float(weights.sum(dtype=np.float64))
    lists = sample.ids, sample.loss_mask.view(np.uint8), _NO_WEIGHTS if weights is None else weights
    ids_hash, largest = digest(sample.ids), int(sample.ids.max(initial=0))
    numbers = (sample.second_start, trained, weight, largest, ids_hash, digest(mask), split_hash)
    return (*lists, location, sample.label, *numbers)


def record_batch(rows: Sequence[ColumnValues]) -> Any:
    """Return rows of the schema as one Arrow record batch."""
    arrays = []
    for column, field in zip(zip(*rows, strict=True), SCHEMA, strict=True):
        values: list[Any] = list(column)
        if not pa.types.is_large_list(field.type):
            arrays.append(pa.array(values, field.type))
            continue
        offsets = np.cumsum([0, *map(len, values)], dtype=np.int64)
        joined = np.concatenate(values, dtype=field.type.value_type.to_pandas_dtype(), casting="unsafe")
        arrays.append(pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(joined)))
    return pa.record_batch(arrays, schema=SCHEMA)


def digest(values: NDArray[Any]) -> int:
    """Return a 64-bit hash, equal on all machines."""
    return int.from_bytes(hashlib.blake2b(values.tobytes(), digest_size=8).digest(), "little")


class RecordBatchView:
    """Numpy views of one record batch, without copies."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self.offsets, self.ids = self._lists("input_ids")
        self.loss_mask = self._lists("loss_mask")[1].view(np.bool_)
        self.weight_offsets, self.weights = self._lists("weights")

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    def numbers(self, name: str) -> NDArray[Any]:
        return _values(self._batch.column(name))

    def text(self, name: str, row: int) -> str:
        return str(self._batch.column(name)[row].as_py())

    def labels(self) -> NDArray[Any]:
        """Return the label of each row, or None."""
        return np.array(self._batch.column("label").to_pylist(), object)

    def _lists(self, name: str) -> tuple[NDArray[np.int64], NDArray[Any]]:
        column = self._batch.column(name)
        return _values(column.offsets), _values(column.values)


def _values(array: Any) -> NDArray[Any]:
    """Return a view of a column; `to_numpy` would import pandas, which takes more than a second."""
    dtype, buffer = np.dtype(array.type.to_pandas_dtype()), array.buffers()[1]
    if buffer is None:  # no values
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, len(array), array.offset * dtype.itemsize)


class TokenRows:
    """Immutable rows; selections and mixes share the record batches of their sources.

    `labeling` is the label type.
    """

    def __init__(
        self, *batches: RecordBatchView, chosen: NDArray[np.int64] | None = None, labeling: str = "single"
    ) -> None:
        self.labeling = labeling
        self._batches = batches
        self._firsts: NDArray[np.int64] = np.cumsum([0, *map(len, batches)])
        self._chosen = np.arange(self._firsts[-1]) if chosen is None else chosen

    @classmethod
    def concat(cls, parts: Sequence["TokenRows"]) -> "TokenRows":
        before = np.cumsum([0, *(part._firsts[-1] for part in parts)])
        chosen = [part._chosen + first for part, first in zip(parts, before, strict=False)]
        batches, labeling = [batch for part in parts for batch in part._batches], parts[0].labeling
        return cls(*batches, chosen=np.concatenate(chosen), labeling=labeling)

    def labeled_as(self, labeling: str) -> "TokenRows":
        """Return the same rows with another label type."""
        return TokenRows(*self._batches, chosen=self._chosen, labeling=labeling)

    def select(self, indices: Sequence[int] | NDArray[np.int64]) -> "TokenRows":
        return TokenRows(*self._batches, chosen=self._chosen[np.asarray(indices, np.int64)], labeling=self.labeling)

    def __len__(self) -> int:
        return len(self._chosen)

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        lengths = self._of_chosen([np.diff(batch.offsets) for batch in self._batches]).astype(np.int32)
        lengths.flags.writeable = False
        return lengths

    @property
    def longer_answers(self) -> NDArray[np.int32]:
        """Tokens of the longer answer of each row, prompt included, for rows with pairs of answers."""
        second = self._column("second_start")
        return np.asarray(np.maximum(second, self.lengths - second), np.int32)

    def ids(self, i: int) -> NDArray[np.int32]:
        """Return the token IDs of row i, as a read-only view of the file."""
        batch, row = self._at(i)
        return batch.ids[batch.offsets[row] : batch.offsets[row + 1]]

    def loss_mask(self, i: int) -> NDArray[np.bool_]:
        """Return the loss mask of row i; the first token is never in it."""
        batch, row = self._at(i)
        return batch.loss_mask[batch.offsets[row] : batch.offsets[row + 1]]

    def weights(self, i: int) -> NDArray[np.float32] | None:
        """Return the loss weight of each token of row i, 0 for untrained tokens; None: all trained tokens have 1."""
        batch, row = self._at(i)
        weights = batch.weights[batch.weight_offsets[row] : batch.weight_offsets[row + 1]]
        return weights if len(weights) else None

    def source_location(self, i: int) -> str:
        """Return the source location of row i: "train.jsonl:17", or "org/name[train] row 17"."""
        batch, row = self._at(i)
        return batch.text("source_location", row)

    def second_start(self, i: int) -> int:
        """Return the index of the first token of the second text of row i; -1 for models without token types."""
        batch, row = self._at(i)
        return int(batch.numbers("second_start")[row])

    def class_of(self, i: int) -> str:
        return str(self._labels[i])

    def class_counts(self) -> dict[str, int]:
        """Return the count of each class, in the order of `in_order`; empty if rows have no labels."""
        counted = Counter[str]()
        for label, number in self.labels.items():
            for name in LABELINGS[self.labeling].classes(label):
                counted[name] += number
        return {name: counted[name] for name in in_order(counted)}

    @cached_property
    def labels(self) -> Counter[str]:
        """Number of rows by label text."""
        return Counter(label for label in self._labels if label is not None)

    def where_label(self, condition: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Return whether a condition is true for the label of each row; evaluated once per label text."""
        results = {label: condition(label) for label in self.labels}
        return np.array([label is not None and results[label] for label in self._labels], np.bool_)

    @cached_property
    def _labels(self) -> NDArray[Any]:
        return self._of_chosen([batch.labels() for batch in self._batches])

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(self.lengths.max(initial=0))

    @cached_property
    def followers(self) -> NDArray[np.int64]:
        """Index of another row for each row, the next in content order: usually with another prompt."""
        _, first, which = np.unique(self.content_hashes, return_index=True, return_inverse=True)
        return np.asarray(np.roll(first, -1)[which], np.int64)

    @property
    def label_counts(self) -> NDArray[np.int64]:
        """Trained tokens of each row; 1 for a row with a label."""
        return self._column("num_trained")

    @cached_property
    def num_trained(self) -> int:
        return int(self.label_counts.sum())

    @cached_property
    def label_weight(self) -> float:
        """Total weight of all trained tokens: their number unless weights are set."""
        return float(self._column("label_weight").sum())

    @property
    def num_weighted(self) -> int:
        """Number of rows with token weights other than 0 and 1."""
        return int((self._of_chosen([np.diff(batch.weight_offsets) for batch in self._batches]) > 0).sum())

    @cached_property
    def largest_id(self) -> int:
        """Largest token ID in the files, including rows that are not selected."""
        return max((int(batch.numbers("largest_id").max(initial=0)) for batch in self._batches), default=0)

    @property
    def ids_hashes(self) -> NDArray[np.uint64]:
        """Hashes of the token IDs of each row."""
        return self._column("ids_hash")

    @cached_property
    def content_hashes(self) -> NDArray[np.uint64]:
        """Hashes of the token IDs, loss mask and weights of each row."""
        return np.asarray(self.ids_hashes + self._column("mask_hash") * _MASK_HASH_FACTOR, np.uint64)

    @property
    def is_duplicate(self) -> NDArray[np.bool_]:
        """Whether each row is a duplicate of an earlier one."""
        duplicate = np.ones(len(self), np.bool_)
        duplicate[np.unique(self.content_hashes, return_index=True)[1]] = False
        return duplicate

    @property
    def split_hashes(self) -> NDArray[np.uint64]:
        """Hashes that are equal for rows that must be in the same split."""
        return self._column("split_hash")

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all token IDs, masks and weights, in order."""
        content = hashlib.sha256(self.ids_hashes.tobytes())
        content.update(self._column("mask_hash").tobytes())
        return content.hexdigest()

    def _at(self, i: int) -> tuple[RecordBatchView, int]:
        """Return the batch of row i and its index in the batch."""
        row = int(self._chosen[i])
        batch = int(np.searchsorted(self._firsts, row, "right")) - 1
        return self._batches[batch], row - int(self._firsts[batch])

    def _column(self, name: str) -> NDArray[Any]:
        return self._of_chosen([batch.numbers(name) for batch in self._batches])

    def _of_chosen(self, parts: list[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate(parts)[self._chosen] if parts else np.empty(0, np.int64)


class MismatchedRows(TokenRows):
    """Prompts of `rows` with answers of other rows, truncated to the longest row."""

    def __init__(self, rows: TokenRows, chosen: NDArray[np.int64] | None = None) -> None:
        self._rows = rows
        self._chosen = np.arange(len(rows)) if chosen is None else chosen

    def select(self, indices: Sequence[int] | NDArray[np.int64]) -> "MismatchedRows":
        return MismatchedRows(self._rows, self._chosen[np.asarray(indices, np.int64)])

    def ids(self, i: int) -> NDArray[np.int32]:
        return self._joined(self._rows.ids, i)

    def loss_mask(self, i: int) -> NDArray[np.bool_]:
        return self._joined(self._rows.loss_mask, i)

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        return np.array([len(self.ids(i)) for i in range(len(self))], np.int32)

    def content_hash(self, i: int) -> int:
        """Return the hash of the token IDs and loss mask of row i."""
        factor = int(_MASK_HASH_FACTOR)
        return (digest(self.ids(i)) + digest(self.loss_mask(i).view(np.uint8)) * factor) % 2**64

    @cached_property
    def content_hashes(self) -> NDArray[np.uint64]:
        return np.array([self.content_hash(i) for i in range(len(self))], np.uint64)

    def _joined(self, of_row: Callable[[int], NDArray[Any]], i: int) -> NDArray[Any]:
        row = int(self._chosen[i])
        other = int(self._rows.followers[row])
        prompt, answer = (int(np.argmax(self._rows.loss_mask(index))) for index in (row, other))
        parts = of_row(row)[:prompt], of_row(other)[answer:]
        joined: NDArray[Any] = np.concatenate(parts)[: self._rows.longest]
        return joined


def in_order(names: Iterable[str]) -> list[str]:
    """Sort labels in model order: integers by value, words by characters."""
    labels = list(names)
    if all(_WHOLE_NUMBER.fullmatch(name) for name in labels):
        return sorted(labels, key=lambda name: (int(name), name))
    return sorted(labels)


# ---- token cache


CODE_VERSION = 14  # increase it with every change of the stored rows; a test with rows of all formats detects changes
BATCH_ROWS = 4096  # of one record batch
_BATCH_TOKENS = 1 << 22  # fewer rows if they are long
_ABANDONED_SECONDS = 24 * 3600  # age at which an incomplete file is removed without a lock
_META_KEY = "rows"

Facts = dict[str, Any]  # counts of the rows, as JSON
log = logging.getLogger(__name__)


def cached_rows(cache_dir: str, key: str, write: "Callable[[RowWriter], Facts]") -> tuple[TokenRows, Facts]:
    """Return the rows of `key` and their stored facts; `write` creates both if missing."""
    path = Path(cache_dir).expanduser() / "tokens" / f"{key}.arrow"
    cached = open_rows(path)
    if cached is None:
        with _lock(path, cache_dir) as locked:
            cached = open_rows(path)  # another process may have created it while this one waited
            if cached is None:
                _remove_abandoned(path, locked=locked)
                _make(path, cache_dir, write)
                cached = open_rows(path)
    if cached is None:
        raise EnvironmentProblem(
            f"cache_dir={cache_dir}: data read back differs from the data just written;"
            " set cache_dir to a folder on another disk"
        )
    return cached


def open_rows(path: Path) -> tuple[TokenRows, Facts] | None:
    """Memory-map the file of a RowWriter; None if it is missing or incomplete."""
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        if reader.schema != SCHEMA:  # from another version
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
    """Convert a full disk or a read-only folder to a user error."""
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(
            f"cache_dir={cache_dir}: cannot write the token cache: {error.strerror}; free disk space there, or set"
            " cache_dir to another folder"
        ) from error


class RowWriter:
    """Writer of rows in record batches, so that memory use is independent of their number."""

    def __init__(self, path: Path, cache_dir: str) -> None:
        self._cache_dir = cache_dir
        self._pending: list[ColumnValues] = []  # rows of the next batch
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
        """Write the remaining rows and sync the file to disk."""
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
    """Let one process at a time create a file; False if the file system has no locks: all create equal files."""
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
    """Remove incomplete files of killed writers: immediately for this file if the lock is held."""
    for part in path.parent.glob("*.part"):
        with contextlib.suppress(OSError):
            is_dead = locked and part.name.startswith(f"{path.stem}.")
            if is_dead or time.time() - part.stat().st_mtime > _ABANDONED_SECONDS:
                part.unlink()


def cache_key(content: str, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> str:
    """Hash content, tokenizer, settings and code, independent of path and machine."""
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
