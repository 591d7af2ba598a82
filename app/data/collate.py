"""Token rows into one Batch, padded or packed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from app.batch import IGNORE, Batch, LossWeights, PackedSequences
from app.data.objectives import NEXT_TOKEN, LabelledTokens, Objective, read
from app.data.packing import plan_bins, shuffle_bins
from app.data.token_dataset import TokenRows

_MULTIPLE = 8  # row lengths that the matrix units of GPUs like; shorter rows are padded up to it


def collate_padded(rows: Sequence[LabelledTokens], pad_id: int, *, isolate: bool = False) -> Batch:
    """Rows of one document each, padded on the right. No rows at all make a batch that trains nothing.

    `isolate` makes the padding of each row a document of its own, for models whose tokens see those after them.
    """
    lengths = tuple(len(row.ids) for row in rows)
    longest = max(lengths, default=1)
    width = _round_up(longest)
    ids = np.full((max(len(rows), 1), width), pad_id, dtype=np.int64)
    label_rows, targets = [], []
    for r, row in enumerate(rows):
        ids[r, : len(row.ids)] = row.ids
        label_rows.append(r * width + row.at)
        targets.append(row.targets)
    num_labels = sum(len(t) for t in targets)
    return Batch(
        ids=torch.from_numpy(ids),
        # padding repeats the last position: the model may have no more of them
        positions=torch.arange(width).clamp(max=longest - 1).expand(ids.shape).contiguous(),
        label_rows=_column(label_rows, empty=0),
        targets=_column(targets, empty=IGNORE),
        lengths=lengths,
        num_labels=num_labels,
        num_tokens=sum(lengths),
        documents=_with_padding(lengths, width) if isolate else None,
        weights=_weights(rows),
        token_type_ids=_token_type_ids(rows, [r * width for r in range(len(rows))], ids.shape),
    )


def _with_padding(lengths: Sequence[int], width: int) -> PackedSequences:
    """Each row's document and its padding, one after another through all rows."""
    parts = [part for n in lengths or (0,) for part in (n, width - n) if part]
    return PackedSequences.from_lengths(parts, width, max_documents=2 * max(len(lengths), 1))


@dataclass(frozen=True, slots=True)
class BinShape:
    """What is the same for every bin of a plan: its tokens, the longest document and the most documents of any."""

    tokens: int
    max_length: int
    max_documents: int


def collate_packed(rows: Sequence[LabelledTokens], pad_id: int, shape: BinShape) -> Batch:
    """Rows side by side, each with positions of its own; documents without labels fill up.

    These are as long as a row may be: the model may have no more positions, and attention over a longer one costs more.
    """
    lengths = tuple(len(row.ids) for row in rows)
    used = sum(lengths)
    full, rest = divmod(shape.tokens - used, shape.max_length)
    documents = (*lengths, *[shape.max_length] * full, *([rest] if rest else []))
    ids = np.full(shape.tokens, pad_id, dtype=np.int64)
    label_rows, targets, start = [], [], 0
    for row in rows:
        ids[start : start + len(row.ids)] = row.ids
        label_rows.append(start + row.at)
        targets.append(row.targets)
        start += len(row.ids)
    positions = np.concatenate([np.arange(n) for n in documents])
    return Batch(
        ids=torch.from_numpy(ids)[None],
        positions=torch.from_numpy(positions)[None],
        label_rows=_column(label_rows, empty=0),
        targets=_column(targets, empty=IGNORE),
        lengths=lengths,
        num_labels=sum(len(t) for t in targets),
        num_tokens=used,
        documents=PackedSequences.from_lengths(documents, shape.max_length, shape.max_documents),
        weights=_weights(rows),
        token_type_ids=_token_type_ids(rows, list(accumulate(lengths, initial=0)), (1, shape.tokens)),
    )


def _weights(rows: Sequence[LabelledTokens]) -> LossWeights | None:
    """Of all targets, if those of a single row count differently."""
    if all(row.weights is None for row in rows):
        return None
    parts = [np.ones(len(row.targets), np.float32) if row.weights is None else row.weights for row in rows]
    each = np.concatenate(parts)
    return LossWeights(torch.from_numpy(each), float(each.sum(dtype=np.float64)))


def _token_type_ids(
    rows: Sequence[LabelledTokens], starts: Sequence[int], shape: tuple[int, ...]
) -> torch.Tensor | None:
    """1 where the second side of each pair is; nothing where no row has sides."""
    if all(row.second_start < 0 for row in rows):
        return None
    flat = np.zeros(math.prod(shape), np.int64)
    for row, start in zip(rows, starts, strict=False):
        if row.second_start >= 0:
            flat[start + row.second_start : start + len(row.ids)] = 1
    return torch.from_numpy(flat.reshape(shape))


def _round_up(size: int) -> int:
    return -(-size // _MULTIPLE) * _MULTIPLE


def _column(parts: list[np.ndarray], empty: int) -> torch.Tensor:
    """One tensor of all parts; one `empty` entry when there are none, so that a graph always hangs on the rows."""
    joined = np.concatenate(parts) if any(len(p) for p in parts) else np.array([empty])
    return torch.from_numpy(joined.astype(np.int64))


Unit = NDArray[np.int64]  # the rows that are never parted: one row, or those of a bin


@dataclass(frozen=True, slots=True)
class Units:
    """All units of an epoch: unit i holds the rows `order[starts[i]:starts[i + 1]]`."""

    order: NDArray[np.int64]
    starts: NDArray[np.int64]
    max_documents: int = 1  # of a unit, filling included

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> Unit:
        end = self.starts[i + 1] if i + 1 < len(self.starts) else len(self.order)
        return self.order[self.starts[i] : end]


class Layout(Protocol):
    """How rows become units, and units a batch."""

    @property
    def units_per_batch(self) -> int:
        """Units of one micro-batch."""

    @property
    def unit_name(self) -> str:
        """In the plural, for people."""

    def units(
        self, rows: TokenRows, order: NDArray[np.int64], stir: np.random.Generator | None = None
    ) -> Units:
        """All rows, in units; `order` says which of equal rows come first, `stir` who else may change places."""

    def batch(self, rows: TokenRows, units: Sequence[Unit], max_documents: int, epoch: int) -> Batch:
        """One micro-batch; of no units, one that trains nothing. `max_documents` is that of all its units."""


@dataclass(frozen=True, slots=True)
class Padded:
    """Each row by itself, padded to the longest of its micro-batch."""

    rows: int
    pad_id: int
    labels: Objective = NEXT_TOKEN

    @property
    def units_per_batch(self) -> int:
        """As many as were asked for."""
        return self.rows

    @property
    def unit_name(self) -> str:
        """What `batching.rows` counts."""
        return "rows"

    def units(
        self,
        rows: TokenRows,
        order: NDArray[np.int64],
        stir: np.random.Generator | None = None,  # noqa: ARG002  rows are alone
    ) -> Units:
        """One row each."""
        return Units(order, np.arange(len(rows)))

    def batch(self, rows: TokenRows, units: Sequence[Unit], max_documents: int, epoch: int) -> Batch:  # noqa: ARG002  rows are alone
        """Rows of like length side by side waste little; the sum of a step does not depend on it."""
        labelled = read(rows, units, self.labels, epoch)
        return collate_padded(labelled, self.pad_id, isolate=self.labels.bidirectional)


@dataclass(frozen=True, slots=True)
class Packed:
    """Bins of `tokens`, filled best-fit over all rows; one bin is one micro-batch."""

    tokens: int
    pad_id: int
    max_length: int  # no row has more tokens; at most `tokens`
    labels: Objective = NEXT_TOKEN

    @property
    def units_per_batch(self) -> int:
        """A longer bin does what more bins would."""
        return 1

    @property
    def unit_name(self) -> str:
        """Of `batching.tokens` each."""
        return "bins"

    def units(
        self, rows: TokenRows, order: NDArray[np.int64], stir: np.random.Generator | None = None
    ) -> Units:
        """The bins of a plan over rows in `order`: shuffle_bins or not as many, of as many documents at most."""
        lengths = rows.lengths[order]
        placed, starts = plan_bins(lengths, self.tokens)
        most = self._max_documents(lengths[placed], starts)
        if stir is not None and len(starts) > 1:
            most_room = (
                most - np.diff(starts, append=len(placed))
            ) * self.max_length  # to be filled by documents
            placed = shuffle_bins(placed, starts, lengths[placed], self.tokens, most_room, stir)
        return Units(order[placed], starts, most)

    def batch(self, rows: TokenRows, units: Sequence[Unit], max_documents: int, epoch: int) -> Batch:
        """One bin, filled up to its full length."""
        shape = BinShape(self.tokens, self.max_length, max_documents)
        return collate_packed(read(rows, units, self.labels, epoch), self.pad_id, shape)

    def _max_documents(self, lengths: NDArray[Any], starts: NDArray[np.int64]) -> int:
        """The same for any order of the rows. No row is longer than what fills up, so a bin without rows has fewer."""
        if not len(starts):
            return -(-self.tokens // self.max_length)
        room = self.tokens - np.add.reduceat(lengths.astype(np.int64), starts)
        rows = np.diff(starts, append=len(lengths))
        return int((rows - (-room // self.max_length)).max())
