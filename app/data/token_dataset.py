"""Token rows in Arrow files: read as numpy views, one file per cache key.

A file is there whole or not at all: its footer, and the numbers of rows and tokens, are written last. Of several
processes that need the same rows one prepares them, and the others log that they wait.
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

# `mask_hash` is of the loss mask; of the weights where some are neither 0 nor 1, and of the label where there is one.
SCHEMA = pa.schema(
    [
        ("input_ids", pa.large_list(pa.int32())),
        ("loss_mask", pa.large_list(pa.uint8())),  # of each token 1 or 0
        ("weights", pa.large_list(pa.float32())),  # of each token; empty where all are 0 or 1
        ("source_location", pa.string()),
        ("label", pa.string()),  # null: what is learnt is tokens
        ("second_start", pa.int32()),  # the first token of the second text of a pair, or -1
        ("num_trained", pa.int64()),
        ("label_weight", pa.float64()),  # of all trained tokens together
        ("largest_id", pa.int32()),
        ("ids_hash", pa.uint64()),
        ("mask_hash", pa.uint64()),
        ("split_hash", pa.uint64()),  # equal for rows that must not be parted between training and evaluation
    ]
)
_NO_WEIGHTS = np.empty(0, np.float32)
_MASK_HASH_FACTOR = np.uint64(0xC2B2AE3D27D4EB4F)
_WHOLE_NUMBER = re.compile(r"[-+]?[0-9]{1,18}")

ColumnValues = tuple[Any, ...]  # of one row, in the order of the schema


def as_columns(location: str, sample: Tokens, split_hash: int) -> ColumnValues:
    """One row of the schema."""
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
    """Rows of the schema as one Arrow record batch."""
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
    """64 bits of a hash, equal on every machine."""
    return int.from_bytes(hashlib.blake2b(values.tobytes(), digest_size=8).digest(), "little")


class RecordBatchView:
    """Numpy views of one record batch; nothing is copied."""

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
        """The label of each row; None where it has none."""
        return np.array(self._batch.column("label").to_pylist(), object)

    def _lists(self, name: str) -> tuple[NDArray[np.int64], NDArray[Any]]:
        column = self._batch.column(name)
        return _values(column.offsets), _values(column.values)


def _values(array: Any) -> NDArray[Any]:
    """View a column; `to_numpy` would import pandas where it is installed: a second and more."""
    dtype, buffer = np.dtype(array.type.to_pandas_dtype()), array.buffers()[1]
    if buffer is None:  # of no values
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, len(array), array.offset * dtype.itemsize)


class TokenRows:
    """Immutable rows; a selection shares the record batches of the whole, and a mix those of its sources.

    `labeling` says what the text of a label is.
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
        """The same rows, their labels read otherwise."""
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
        """Tokens of the longer answer of each row, prompt included, where rows are pairs of answers."""
        second = self._column("second_start")
        return np.asarray(np.maximum(second, self.lengths - second), np.int32)

    def ids(self, i: int) -> NDArray[np.int32]:
        """Token ids of row i, as a read-only view of the file."""
        batch, row = self._at(i)
        return batch.ids[batch.offsets[row] : batch.offsets[row + 1]]

    def loss_mask(self, i: int) -> NDArray[np.bool_]:
        """Mask of the tokens of row i that the model must predict; never the first."""
        batch, row = self._at(i)
        return batch.loss_mask[batch.offsets[row] : batch.offsets[row + 1]]

    def weights(self, i: int) -> NDArray[np.float32] | None:
        """Loss weight of each token of row i, 0 where it is not trained; None: trained ones count 1."""
        batch, row = self._at(i)
        weights = batch.weights[batch.weight_offsets[row] : batch.weight_offsets[row + 1]]
        return weights if len(weights) else None

    def source_location(self, i: int) -> str:
        """Source location of row i: "train.jsonl:17", or "org/name[train] row 17"."""
        batch, row = self._at(i)
        return batch.text("source_location", row)

    def second_start(self, i: int) -> int:
        """Index of the first token of the second text of row i; -1 where the model has no token types."""
        batch, row = self._at(i)
        return int(batch.numbers("second_start")[row])

    def class_of(self, i: int) -> str:
        return str(self._labels[i])

    def class_counts(self) -> dict[str, int]:
        """Rows, or places, of each class that occurs, in the order of `in_order`; empty where rows have no labels."""
        counted = Counter[str]()
        for label, number in self.labels.items():
            for name in LABELINGS[self.labeling].classes(label):
                counted[name] += number
        return {name: counted[name] for name in in_order(counted)}

    @cached_property
    def labels(self) -> Counter[str]:
        """How many rows have each text of a label."""
        return Counter(label for label in self._labels if label is not None)

    def where_label(self, holds: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Whether something holds for the label of each row, asked once for each text."""
        known = {label: holds(label) for label in self.labels}
        return np.array([label is not None and known[label] for label in self._labels], np.bool_)

    @cached_property
    def _labels(self) -> NDArray[Any]:
        return self._of_chosen([batch.labels() for batch in self._batches])

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(self.lengths.max(initial=0))

    @cached_property
    def followers(self) -> NDArray[np.int64]:
        """Of each row another one, the next in the order of their content: mostly of another prompt."""
        _, first, which = np.unique(self.content_hashes, return_index=True, return_inverse=True)
        return np.asarray(np.roll(first, -1)[which], np.int64)

    @property
    def label_counts(self) -> NDArray[np.int64]:
        """Trained tokens of each row; 1 where it has a label."""
        return self._column("num_trained")

    @cached_property
    def num_trained(self) -> int:
        return int(self.label_counts.sum())

    @cached_property
    def label_weight(self) -> float:
        """Weight of all trained tokens together: their number, where no weight says otherwise."""
        return float(self._column("label_weight").sum())

    @property
    def num_weighted(self) -> int:
        """Rows with tokens that count neither 0 nor 1."""
        return int((self._of_chosen([np.diff(batch.weight_offsets) for batch in self._batches]) > 0).sum())

    @cached_property
    def largest_id(self) -> int:
        """Largest token id in the files, rows that are not selected included."""
        return max((int(batch.numbers("largest_id").max(initial=0)) for batch in self._batches), default=0)

    @property
    def ids_hashes(self) -> NDArray[np.uint64]:
        """A hash of each row's token ids."""
        return self._column("ids_hash")

    @cached_property
    def content_hashes(self) -> NDArray[np.uint64]:
        """A hash of each row's token ids, loss mask and weights."""
        return np.asarray(self.ids_hashes + self._column("mask_hash") * _MASK_HASH_FACTOR, np.uint64)

    @property
    def is_duplicate(self) -> NDArray[np.bool_]:
        """Whether each row is equal to an earlier one."""
        duplicate = np.ones(len(self), np.bool_)
        duplicate[np.unique(self.content_hashes, return_index=True)[1]] = False
        return duplicate

    @property
    def split_hashes(self) -> NDArray[np.uint64]:
        """A hash that rows share which must not be parted between training and evaluation."""
        return self._column("split_hash")

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all token ids, masks and weights, in their order."""
        content = hashlib.sha256(self.ids_hashes.tobytes())
        content.update(self._column("mask_hash").tobytes())
        return content.hexdigest()

    def _at(self, i: int) -> tuple[RecordBatchView, int]:
        """The batch of row i, and its index there."""
        row = int(self._chosen[i])
        batch = int(np.searchsorted(self._firsts, row, "right")) - 1
        return self._batches[batch], row - int(self._firsts[batch])

    def _column(self, name: str) -> NDArray[Any]:
        return self._of_chosen([batch.numbers(name) for batch in self._batches])

    def _of_chosen(self, every: list[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate(every)[self._chosen] if every else np.empty(0, np.int64)


class MismatchedRows(TokenRows):
    """The prompt of each of `rows` with the answer of another one, cut where it would be the longest row of all."""

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
        """A hash of the token ids and the loss mask of row i."""
        factor = int(_MASK_HASH_FACTOR)
        return (digest(self.ids(i)) + digest(self.loss_mask(i).view(np.uint8)) * factor) % 2**64

    @cached_property
    def content_hashes(self) -> NDArray[np.uint64]:
        return np.array([self.content_hash(i) for i in range(len(self))], np.uint64)

    def _joined(self, of_row: Callable[[int], NDArray[Any]], i: int) -> NDArray[Any]:
        own = int(self._chosen[i])
        other = int(self._rows.followers[own])
        prompt, answer = (int(np.argmax(self._rows.loss_mask(row))) for row in (own, other))
        parts = of_row(own)[:prompt], of_row(other)[answer:]
        joined: NDArray[Any] = np.concatenate(parts)[: self._rows.longest]
        return joined


def in_order(names: Iterable[str]) -> list[str]:
    """Sort labels as a model has them: whole numbers by size, words by their characters."""
    known = list(names)
    if all(_WHOLE_NUMBER.fullmatch(name) for name in known):
        return sorted(known, key=lambda name: (int(name), name))
    return sorted(known)


# ---- token cache


CODE_VERSION = 13  # raise it with every change of what rows become; a test of rows of all formats says when
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
            f"cache_dir={cache_dir}: data read back differs from the data just written;"
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
            f"cache_dir={cache_dir}: cannot write the token cache: {error.strerror}; free disk space there, or set"
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
