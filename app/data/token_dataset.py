"""Token rows as numpy views of Arrow record batches: what the loader reads, row by row."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from app.data.tokenizer import Tokens

# One row. `ids_hash` is of the token ids, `mask_hash` of the mask (of the weights where some are neither 0 nor 1, of
# the label where there is one); rows of one `side` must not be parted between training and evaluation.
SCHEMA = pa.schema(
    [
        ("input_ids", pa.large_list(pa.int32())),
        ("trained", pa.large_list(pa.uint8())),  # of each token 1 or 0
        ("weights", pa.large_list(pa.float32())),  # of each token; empty where all are 0 or 1
        ("place", pa.string()),
        ("label", pa.string()),  # null: what is learnt is tokens
        ("second", pa.int32()),  # the first token of the second side of a pair, or -1
        ("num_trained", pa.int64()),
        ("label_weight", pa.float64()),  # what the trained tokens count together
        ("largest_id", pa.int32()),
        ("ids_hash", pa.uint64()),
        ("mask_hash", pa.uint64()),
        ("side", pa.uint64()),
    ]
)
_NO_WEIGHTS = np.empty(0, np.float32)
_MASK_FACTOR = np.uint64(0xC2B2AE3D27D4EB4F)
_WHOLE_NUMBER = re.compile(r"[-+]?[0-9]{1,18}")

Columns = tuple[Any, ...]  # of one row, in the order of the schema


def as_columns(place: str, sample: Tokens, side: int) -> Columns:
    """One row of the schema."""
    weights = _other_than_0_and_1(sample.weights)
    mask: NDArray[Any] = sample.trained if weights is None else weights
    trained = int(np.count_nonzero(sample.trained))
    if sample.label is not None:
        mask, trained = np.frombuffer(f"{sample.label} {sample.second}".encode(), np.uint8), 1
    weight = float(trained) if weights is None else float(weights.sum(dtype=np.float64))
    lists = sample.ids, sample.trained.view(np.uint8), _NO_WEIGHTS if weights is None else weights
    ids_hash, largest = digest(sample.ids), int(sample.ids.max(initial=0))
    numbers = (sample.second, trained, weight, largest, ids_hash, digest(mask), side)
    return (*lists, place, sample.label, *numbers)


def record_batch(rows: Sequence[Columns]) -> Any:
    """Rows of the schema as Arrow has them."""
    columns = zip(*rows, strict=True)
    arrays = [_array(list(values), field.type) for values, field in zip(columns, SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=SCHEMA)


def digest(values: NDArray[Any]) -> int:
    """64 bits that equal values share on every machine."""
    return int.from_bytes(hashlib.blake2b(values.tobytes(), digest_size=8).digest(), "little")


def _other_than_0_and_1(weights: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
    return None if weights is None or np.isin(weights, (0, 1)).all() else weights


def _array(values: list[Any], kind: Any) -> Any:
    if not pa.types.is_large_list(kind):
        return pa.array(values, kind)
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int64)
    joined = np.concatenate(values, dtype=kind.value_type.to_pandas_dtype(), casting="unsafe")
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(joined))


class RecordBatchView:
    """Numpy views of one record batch; nothing is copied."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self.offsets, self.ids = self._lists("input_ids")
        self.trained = self._lists("trained")[1].view(np.bool_)
        self.weight_offsets, self.weights = self._lists("weights")

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    def column(self, name: str) -> NDArray[Any]:
        """A column of numbers."""
        return _values(self._batch.column(name))

    def text(self, name: str, row: int) -> str:
        """One value of a column of text."""
        return str(self._batch.column(name)[row].as_py())

    def coded_labels(self) -> tuple[list[str | None], NDArray[np.int32]]:
        """The labels there are, and of each row the number of its own."""
        coded = self._batch.column("label").dictionary_encode("encode")
        return coded.dictionary.to_pylist(), _values(coded.indices)

    def _lists(self, name: str) -> tuple[NDArray[np.int64], NDArray[Any]]:
        column = self._batch.column(name)
        return _values(column.offsets), _values(column.values)


def _values(array: Any) -> NDArray[Any]:
    """Not by `to_numpy`, which imports pandas where it is installed: a second and more."""
    dtype, buffer = np.dtype(array.type.to_pandas_dtype()), array.buffers()[1]
    if buffer is None:  # of no values
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, len(array), array.offset * dtype.itemsize)


class TokenRows:
    """Immutable; a selection shares the record batches of the whole, and a mix those of its sources."""

    def __init__(self, *batches: RecordBatchView, chosen: NDArray[np.int64] | None = None) -> None:
        self._batches = batches
        self._firsts: NDArray[np.int64] = np.cumsum([0, *map(len, batches)])
        self._chosen = np.arange(self._firsts[-1]) if chosen is None else chosen

    @classmethod
    def concat(cls, parts: Sequence["TokenRows"]) -> "TokenRows":
        """The rows of all parts, one part after the other."""
        before = np.cumsum([0, *(part._firsts[-1] for part in parts)])
        chosen = [part._chosen + first for part, first in zip(parts, before, strict=False)]
        return cls(*(batch for part in parts for batch in part._batches), chosen=np.concatenate(chosen))

    def select(self, indices: Sequence[int] | NDArray[np.int64]) -> "TokenRows":
        """The rows at `indices`, in that order."""
        return TokenRows(*self._batches, chosen=self._chosen[np.asarray(indices, np.int64)])

    def __len__(self) -> int:
        return len(self._chosen)

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each row."""
        lengths = self._of_chosen([np.diff(batch.offsets) for batch in self._batches]).astype(np.int32)
        lengths.flags.writeable = False
        return lengths

    def ids(self, i: int) -> NDArray[np.int32]:
        """The tokens of row i, as a read-only view of the file."""
        batch, row = self._at(i)
        return batch.ids[batch.offsets[row] : batch.offsets[row + 1]]

    def loss_mask(self, i: int) -> NDArray[np.bool_]:
        """Which tokens of row i the model must predict; never the first."""
        batch, row = self._at(i)
        return batch.trained[batch.offsets[row] : batch.offsets[row + 1]]

    def weights(self, i: int) -> NDArray[np.float32] | None:
        """How much each token of row i counts in the loss, 0 where it is not trained; None: trained ones count 1."""
        batch, row = self._at(i)
        weights = batch.weights[batch.weight_offsets[row] : batch.weight_offsets[row + 1]]
        return weights if len(weights) else None

    def source_location(self, i: int) -> str:
        """Where row i came from: "train.jsonl:17", or "org/name[train] row 17"."""
        batch, row = self._at(i)
        return batch.text("place", row)

    def second_start(self, i: int) -> int:
        """Where the second side of row i begins; -1 where models are told of no sides."""
        batch, row = self._at(i)
        return int(batch.column("second")[row])

    def class_of(self, i: int) -> str:
        """The label of row i, which has one."""
        batch, row = self._at(i)
        return batch.text("label", row)

    def class_counts(self) -> dict[str, int]:
        """Rows of each label that has any, in the order of `in_order`; nothing where rows have none."""
        names, codes = self._classes
        counted = np.bincount(codes[codes >= 0], minlength=len(names)).tolist()
        return {name: number for name, number in zip(names, counted, strict=True) if number}

    def has_class(self, known: Sequence[str]) -> NDArray[np.bool_]:
        """Which rows have one of these labels."""
        names, codes = self._classes
        return np.isin(codes, [at for at, name in enumerate(names) if name in set(known)])

    @cached_property
    def _classes(self) -> tuple[list[str], NDArray[np.int64]]:
        """All labels, whatever batch has them, and for each row the number of its own; -1: it has none."""
        coded = [batch.coded_labels() for batch in self._batches]
        names = in_order({name for labels, _ in coded for name in labels if name is not None})
        numbers: dict[str | None, int] = {name: number for number, name in enumerate(names)}
        every = [
            np.array([numbers.get(label, -1) for label in labels], np.int64)[codes] for labels, codes in coded
        ]
        return names, self._of_chosen(every)

    @property
    def label_counts(self) -> NDArray[np.int64]:
        """Trained tokens of each row; 1 where it has a label."""
        return self._column("num_trained")

    @cached_property
    def num_trained(self) -> int:
        """Trained tokens of all rows."""
        return int(self.label_counts.sum())

    @cached_property
    def label_weight(self) -> float:
        """What all trained tokens count together: their number, where no weight says otherwise."""
        return float(self._column("label_weight").sum())

    @property
    def num_weighted(self) -> int:
        """Rows with tokens that count neither 0 nor 1."""
        return int((self._of_chosen([np.diff(batch.weight_offsets) for batch in self._batches]) > 0).sum())

    @cached_property
    def largest_id(self) -> int:
        """Of all tokens in the files, those of rows that were not chosen too."""
        return max((int(batch.column("largest_id").max(initial=0)) for batch in self._batches), default=0)

    @property
    def ids_hashes(self) -> NDArray[np.uint64]:
        """A hash of each row's token ids."""
        return self._column("ids_hash")

    @property
    def content_hashes(self) -> NDArray[np.uint64]:
        """A hash of each row's token ids, and of which are trained with which weight."""
        return np.asarray(self.ids_hashes + self._column("mask_hash") * _MASK_FACTOR, np.uint64)

    @property
    def is_duplicate(self) -> NDArray[np.bool_]:
        """Which rows are equal to an earlier one."""
        duplicate = np.ones(len(self), np.bool_)
        duplicate[np.unique(self.content_hashes, return_index=True)[1]] = False
        return duplicate

    @property
    def split_hashes(self) -> NDArray[np.uint64]:
        """A hash that rows share which must not be parted between training and evaluation."""
        return self._column("side")

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all token ids, masks and weights, in their order."""
        content = hashlib.sha256(self.ids_hashes.tobytes())
        content.update(self._column("mask_hash").tobytes())
        return content.hexdigest()

    def _at(self, i: int) -> tuple[RecordBatchView, int]:
        """Where row i is: its batch, and its number there."""
        row = int(self._chosen[i])
        batch = int(np.searchsorted(self._firsts, row, "right")) - 1
        return self._batches[batch], row - int(self._firsts[batch])

    def _column(self, name: str) -> NDArray[Any]:
        return self._of_chosen([batch.column(name) for batch in self._batches])

    def _of_chosen(self, every: list[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate(every)[self._chosen] if every else np.empty(0, np.int64)


def in_order(names: Iterable[str]) -> list[str]:
    """Labels in the order that a model has them: whole numbers by size, words by their characters."""
    known = list(names)
    if all(_WHOLE_NUMBER.fullmatch(name) for name in known):
        return sorted(known, key=lambda name: (int(name), name))
    return sorted(known)
