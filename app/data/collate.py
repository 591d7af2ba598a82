"""Token rows into micro-batches: padded rows, or bins of packed rows.

A layout groups rows into units, one row or one bin, that are never split, and collates units into a Batch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from app.batch import IGNORE, Batch, LossWeights, PackedSequences
from app.data.objectives import NEXT_TOKEN, LabeledTokens, Objective
from app.data.packing import plan_bins, shuffle_bins
from app.data.token_dataset import TokenRows

WIDTH_MULTIPLE = 8  # rows are padded to a multiple: efficient for GPU matrix units

Unit = NDArray[np.int64]  # row indices


@dataclass(frozen=True, slots=True)
class Units:
    """Units of an epoch: unit i has the rows `order[starts[i]:starts[i + 1]]`."""

    order: NDArray[np.int64]
    starts: NDArray[np.int64]
    max_documents: int = 1  # of a unit, filler documents included

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> Unit:
        end = self.starts[i + 1] if i + 1 < len(self.starts) else len(self.order)
        return self.order[self.starts[i] : end]


@dataclass(frozen=True, slots=True)
class Padded:
    """One row per unit, padded to the longest row of its micro-batch."""

    unit_name: ClassVar[str] = "rows"
    rows: int  # of the data, in a micro-batch
    pad_id: int
    objective: Objective = NEXT_TOKEN

    @property
    def units_per_batch(self) -> int:
        return self.rows

    def units(
        self,
        rows: TokenRows,
        order: NDArray[np.int64],
        shuffle: np.random.Generator | None = None,  # noqa: ARG002  a unit is one row
    ) -> Units:
        return Units(order, np.arange(len(rows)))

    def batch(self, rows: TokenRows, units: Sequence[Unit], max_documents: int, epoch: int) -> Batch:  # noqa: ARG002
        """Collate one micro-batch; without units, a batch without labels."""
        labeled = [self.objective.label(rows, int(i), epoch) for unit in units for i in unit]
        isolate = self.objective.bidirectional
        batch = collate_padded([*chain(*labeled)], self.pad_id, isolate=isolate)
        others = _others(labeled)
        mean_of = [_of_documents(collate_padded(others, self.pad_id, isolate=isolate), others)] if others else []
        return replace(_by_row(batch, labeled, self.objective), mean_of=tuple(mean_of))


@dataclass(frozen=True, slots=True)
class Packed:
    """Bins of `tokens`, packed best-fit over all rows; one bin is one micro-batch."""

    unit_name: ClassVar[str] = "bins"
    units_per_batch: ClassVar[int] = 1  # a longer bin replaces more bins
    tokens: int
    pad_id: int
    max_length: int  # of a row; at most `tokens`
    objective: Objective = NEXT_TOKEN

    def units(self, rows: TokenRows, order: NDArray[np.int64], shuffle: np.random.Generator | None = None) -> Units:
        """Pack rows into bins in `order`; `shuffle` swaps rows between bins and keeps the number of bins."""
        lengths = rows.lengths[order]
        placed, starts = plan_bins(lengths, self.tokens)
        most = self._max_documents(lengths[placed], starts)
        if shuffle is not None and len(starts) > 1:
            # free space is filled with documents of max_length, whose number is limited
            documents = self.objective.documents_per_row * np.diff(starts, append=len(placed))
            max_left = (most - documents) * self.max_length
            placed = shuffle_bins(placed, starts, lengths[placed], self.tokens, max_left, shuffle)
        return Units(order[placed], starts, most)

    def batch(self, rows: TokenRows, units: Sequence[Unit], max_documents: int, epoch: int) -> Batch:
        """Collate one bin, filled to its full length."""
        shape = BinShape(self.tokens, self.max_length, max_documents)
        labeled = [self.objective.label(rows, int(i), epoch) for unit in units for i in unit]
        batch = collate_packed([*chain(*labeled)], self.pad_id, shape)
        mean_of = tuple(self._bins(_others(labeled), max_documents))
        return replace(_by_row(batch, labeled, self.objective), mean_of=mean_of)

    def _bins(self, documents: Sequence[LabeledTokens], max_documents: int) -> Iterator[Batch]:
        """Collate documents outside any unit. They are shorter than the rows, so a bin may have more fillers."""
        shape = BinShape(self.tokens, self.max_length, max_documents - -self.tokens // self.max_length)
        placed, starts = plan_bins(np.array([len(document.ids) for document in documents], np.int32), self.tokens)
        for chosen in np.split(placed, starts[1:]) if len(starts) else ():
            members = [documents[int(i)] for i in chosen]
            yield _of_documents(collate_packed(members, self.pad_id, shape), members)

    def _max_documents(self, lengths: NDArray[Any], starts: NDArray[np.int64]) -> int:
        """Return the maximum number of documents in a bin, fillers included; independent of the row order.

        A bin without rows has fewer, because no row is longer than a filler document.
        """
        if not len(starts):
            return -(-self.tokens // self.max_length)
        left = self.tokens - np.add.reduceat(lengths.astype(np.int64), starts)
        documents = self.objective.documents_per_row * np.diff(starts, append=len(lengths))
        return int((documents - (-left // self.max_length)).max())


Layout = Padded | Packed


@dataclass(frozen=True, slots=True)
class BinShape:
    """Shape of all bins of a run."""

    tokens: int
    max_length: int  # of a document
    max_documents: int


def _by_row(batch: Batch, rows: Sequence[tuple[LabeledTokens, ...]], objective: Objective) -> Batch:
    """Add the number of documents per data row, and the inputs of a loss over documents."""
    if objective.documents_per_row > 1:
        batch = replace(batch, rows=tuple(map(len, rows)))
    if not objective.over_documents:
        return batch
    return _of_documents(batch, [*chain(*rows)])


def _others(rows: Sequence[tuple[LabeledTokens, ...]]) -> list[LabeledTokens]:
    """Return the additional documents whose mean over the step a loss reads."""
    return [document.mean_of for document in chain(*rows) if document.mean_of is not None]


def _of_documents(batch: Batch, documents: Sequence[LabeledTokens]) -> Batch:
    """Add the document of each label, and the values of each document."""
    labels = [np.full(len(document.at), number) for number, document in enumerate(documents)]
    values = torch.tensor([document.values for document in documents], dtype=torch.float64)
    of_label = _joined(labels, if_empty=len(labels))
    return replace(batch, document_of_label=of_label, document_values=values if values.numel() else None)


def collate_padded(rows: Sequence[LabeledTokens], pad_id: int, *, isolate: bool = False) -> Batch:
    """Pad documents on the right, one per line. Without documents, return a batch without labels.

    `isolate` makes the padding of each row a separate document, for models with bidirectional attention.
    """
    lengths = [len(row.ids) for row in rows]
    longest = max(lengths, default=1)
    width = -(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    starts = [r * width for r in range(len(rows))]
    ids = np.full((max(len(rows), 1), width), pad_id, dtype=np.int64)
    for r, row in enumerate(rows):
        ids[r, : len(row.ids)] = row.ids
    documents = None
    if isolate:  # each row's document and its padding, one after another through all rows
        parts = [part for n in lengths or [0] for part in (n, width - n) if part]
        documents = PackedSequences.from_lengths(parts, width, max_documents=2 * max(len(rows), 1))
    # padding repeats the last position: the model may not have more positions
    positions = np.broadcast_to(np.arange(width).clip(max=longest - 1), ids.shape).copy()
    return _batch(rows, starts, ids, positions, documents)


def collate_packed(rows: Sequence[LabeledTokens], pad_id: int, shape: BinShape) -> Batch:
    """Concatenate rows, each with its own positions, and fill the bin with documents without labels.

    Fillers have the maximum row length: the model may not have more positions, and longer attention costs more.
    """
    lengths = [len(row.ids) for row in rows]
    full, rest = divmod(shape.tokens - sum(lengths), shape.max_length)
    documents = (*lengths, *[shape.max_length] * full, *([rest] if rest else []))
    starts = list(accumulate(lengths, initial=0))[:-1]
    ids = np.full((1, shape.tokens), pad_id, dtype=np.int64)
    for row, start in zip(rows, starts, strict=True):
        ids[0, start : start + len(row.ids)] = row.ids
    positions = np.concatenate([np.arange(n) for n in documents])[None]
    packed = PackedSequences.from_lengths(documents, shape.max_length, shape.max_documents)
    return _batch(rows, starts, ids, positions, packed)


def _batch(
    rows: Sequence[LabeledTokens],
    starts: Sequence[int],
    ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    documents: PackedSequences | None,
) -> Batch:
    """Return the batch of rows that start at `starts` in the flattened IDs."""
    return Batch(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        label_rows=_joined([start + row.at for row, start in zip(rows, starts, strict=True)], if_empty=0),
        targets=_joined([row.targets for row in rows], if_empty=IGNORE),
        lengths=tuple(len(row.ids) for row in rows),
        num_labels=sum(len(row.targets) for row in rows),
        num_tokens=sum(len(row.ids) for row in rows),
        documents=documents,
        weights=_weights(rows),
        token_type_ids=_token_type_ids(rows, starts, ids.shape),
    )


def _joined(parts: list[np.ndarray], if_empty: int) -> torch.Tensor:
    """Concatenate the parts to one tensor, never of size 0: the graph must depend on the rows even without labels."""
    joined = np.concatenate(parts) if any(len(part) for part in parts) else np.array([if_empty])
    return torch.from_numpy(joined.astype(np.float32 if joined.dtype.kind == "f" else np.int64))


def _weights(rows: Sequence[LabeledTokens]) -> LossWeights | None:
    """Return the weights of all targets, or None if no row has weights."""
    if all(row.weights is None for row in rows):
        return None
    parts = [np.ones(len(row.targets), np.float32) if row.weights is None else row.weights for row in rows]
    joined = np.concatenate(parts)
    return LossWeights(torch.from_numpy(joined), float(joined.sum(dtype=np.float64)))


def _token_type_ids(
    rows: Sequence[LabeledTokens], starts: Sequence[int], shape: tuple[int, ...]
) -> torch.Tensor | None:
    """Return 1 for tokens of the second text of each pair; None if no row has two texts."""
    if all(row.second_start < 0 for row in rows):
        return None
    flat = np.zeros(math.prod(shape), np.int64)
    for row, start in zip(rows, starts, strict=True):
        if row.second_start >= 0:
            flat[start + row.second_start : start + len(row.ids)] = 1
    return torch.from_numpy(flat.reshape(shape))
