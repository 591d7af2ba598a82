"""A micro-batch in smaller ones, by documents: the same sums, where memory does not suffice for all of it at once."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from app.batch import IGNORE, Batch, Documents, Weights
from app.engine.scarcity import does_not_fit, tried

Found = TypeVar("Found")


def split(batch: Batch, depth: int) -> list[Batch]:
    """Halved as often as `depth` says, as far as that goes; parts without labels add nothing and are left out."""
    parts = [batch]
    for _ in range(depth):
        parts = [half for part in parts for half in halves(part) or [part]]
    return [part for part in parts if part.num_labels] or parts[:1]


def halves(batch: Batch) -> list[Batch]:
    """Two with all of its documents, one if only what fills up can be left out, or none."""
    count = len(batch.lengths)
    if count > 1:
        cut = _middle(batch)
        return [_part(batch, 0, cut), _part(batch, cut, count)]
    if count == 1 and batch.lengths[0] < batch.ids.numel():
        return [_part(batch, 0, 1)]
    return []


def as_it_fits(batch: Batch, work: Callable[[Batch], Found]) -> Iterator[tuple[Batch, Found]]:
    """`work` on the batch, or on parts of it, in their order."""
    waiting = [batch]
    while waiting:
        part = waiting.pop()
        found = tried(work, part)
        if found is not None:
            yield part, found
            continue
        waiting += reversed(smaller_ones(part))


def smaller_ones(part: Batch) -> list[Batch]:
    """Of what an evaluation has no room for; a document by itself ends the run."""
    smaller = halves(part)
    if not smaller:
        raise does_not_fit(f"a document of {part.num_tokens} tokens by itself, in an evaluation,", {})
    return smaller


def _middle(batch: Batch) -> int:
    """How many of the documents are the first half of the tokens."""
    sums = list(accumulate(batch.lengths))
    return 1 + min(range(len(sums) - 1), key=lambda i: abs(2 * sums[i] - sums[-1]))


def _part(batch: Batch, first: int, last: int) -> Batch:
    """Documents `first` to before `last`."""
    cut = _of_one_row if batch.ids.shape[0] == 1 else _of_rows
    return cut(batch, first, last)


def _of_one_row(batch: Batch, first: int, last: int) -> Batch:
    begin = batch.starts[first]
    end = begin + sum(batch.lengths[first:last])
    columns = slice(begin, end)
    inside = (batch.label_rows >= begin) & (batch.label_rows < end)
    whole = batch.documents
    lengths = batch.lengths[first:last]
    cut = replace(
        batch,
        ids=batch.ids[:, columns],
        positions=batch.positions[:, columns],
        segments=None if batch.segments is None else batch.segments[:, columns],
        documents=None if whole is None else Documents.of(lengths, whole.longest, len(whole.bounds) - 1),
    )
    return _with_labels(cut, batch, (first, last), inside, batch.label_rows - begin)


def _of_rows(batch: Batch, first: int, last: int) -> Batch:
    before, lengths = batch.ids.shape[1], batch.lengths[first:last]
    width = max(lengths)
    rows, columns = slice(first, last), slice(0, width)
    row, column = batch.label_rows // before, batch.label_rows % before
    parts = [part for n in lengths for part in (n, width - n) if part]
    cut = replace(
        batch,
        ids=batch.ids[rows, columns],
        positions=batch.positions[rows, columns],
        segments=None if batch.segments is None else batch.segments[rows, columns],
        documents=None if batch.documents is None else Documents.of(parts),
    )
    inside = (row >= first) & (row < last)
    return _with_labels(cut, batch, (first, last), inside, (row - first) * width + column)


def _with_labels(
    cut: Batch, batch: Batch, documents: tuple[int, int], inside: Tensor, places: Tensor
) -> Batch:
    """`places` are those of all labels of the batch within the part."""
    chosen = inside & (batch.targets != IGNORE)
    labels = int(chosen.sum())
    lengths = batch.lengths[slice(*documents)]
    return replace(
        cut,
        label_rows=places[chosen] if labels else torch.zeros(1, dtype=batch.label_rows.dtype),
        targets=batch.targets[chosen] if labels else torch.full((1,), IGNORE, dtype=batch.targets.dtype),
        lengths=lengths,
        num_labels=labels,
        num_tokens=sum(lengths),
        samples=batch.samples[slice(*documents)],
        weights=_weights(batch, chosen) if labels else None,
    )


def _weights(batch: Batch, chosen: Tensor) -> Weights | None:
    if batch.weights is None:
        return None
    each = batch.weights.each[chosen]
    return Weights(each, float(each.sum(dtype=torch.float64)))
