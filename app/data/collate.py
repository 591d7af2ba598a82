"""Token rows into one Batch, padded or packed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from app.batch import IGNORE, Batch, Documents, Weights
from app.data.labels import Labelled

_MULTIPLE = 8  # row lengths that the matrix units of GPUs like; shorter rows are padded up to it


def collate_padded(rows: Sequence[Labelled], pad_id: int, *, isolate: bool = False) -> Batch:
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
        segments=_segments(rows, [r * width for r in range(len(rows))], ids.shape),
    )


def _with_padding(lengths: Sequence[int], width: int) -> Documents:
    """Each row's document and its padding, one after another through all rows."""
    parts = [part for n in lengths or (0,) for part in (n, width - n) if part]
    return Documents.of(parts, width, places=2 * max(len(lengths), 1))


@dataclass(frozen=True, slots=True)
class BinShape:
    """What is the same for every bin of a plan: its tokens, the longest document and the most documents of any."""

    tokens: int
    longest: int
    places: int


def collate_packed(rows: Sequence[Labelled], pad_id: int, shape: BinShape) -> Batch:
    """Rows side by side, each with positions of its own; documents without labels fill up.

    These are as long as a row may be: the model may have no more positions, and attention over a longer one costs more.
    """
    lengths = tuple(len(row.ids) for row in rows)
    used = sum(lengths)
    full, rest = divmod(shape.tokens - used, shape.longest)
    documents = (*lengths, *[shape.longest] * full, *([rest] if rest else []))
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
        documents=Documents.of(documents, shape.longest, shape.places),
        weights=_weights(rows),
        segments=_segments(rows, list(accumulate(lengths, initial=0)), (1, shape.tokens)),
    )


def _weights(rows: Sequence[Labelled]) -> Weights | None:
    """Of all targets, if those of a single row count differently."""
    if all(row.weights is None for row in rows):
        return None
    parts = [np.ones(len(row.targets), np.float32) if row.weights is None else row.weights for row in rows]
    each = np.concatenate(parts)
    return Weights(torch.from_numpy(each), float(each.sum(dtype=np.float64)))


def _segments(rows: Sequence[Labelled], starts: Sequence[int], shape: tuple[int, ...]) -> torch.Tensor | None:
    """1 where the second side of each pair is; nothing where no row has sides."""
    if all(row.second < 0 for row in rows):
        return None
    flat = np.zeros(math.prod(shape), np.int64)
    for row, start in zip(rows, starts, strict=False):
        if row.second >= 0:
            flat[start + row.second : start + len(row.ids)] = 1
    return torch.from_numpy(flat.reshape(shape))


def _round_up(size: int) -> int:
    return -(-size // _MULTIPLE) * _MULTIPLE


def _column(parts: list[np.ndarray], empty: int) -> torch.Tensor:
    """One tensor of all parts; one `empty` entry when there are none, so that a graph always hangs on the rows."""
    joined = np.concatenate(parts) if any(len(p) for p in parts) else np.array([empty])
    return torch.from_numpy(joined.astype(np.int64))
