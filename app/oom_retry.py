"""Work made again in smaller parts where a device runs out of memory: a batch split by documents, the same sums."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from app.batch import IGNORE, Batch, LossWeights, PackedSequences
from app.errors import EnvironmentProblem, Unfinished

Found = TypeVar("Found")


def tried(work: Callable[..., Found], *given: Any) -> Found | None:
    """What `work` returns, or None where it ran out of memory; by then all that it had made is let go."""
    try:
        return work(*given)
    except torch.OutOfMemoryError:
        pass  # nothing is done here: as long as the exception lives, so does all that its frames hold
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def does_not_fit(what: str, kept: Mapping[str, int]) -> EnvironmentProblem:
    """`kept` is what stays in memory from step to step, by part."""
    parts = ", ".join(f"{name.replace('_', ' ')} {size / 1e9:.2f} GB" for name, size in kept.items() if size)
    beside = f" beside what stays from step to step ({parts})" if parts else ""
    return EnvironmentProblem(
        f"out of memory: {what} does not fit{beside}. Cheapest first: "
        "training.recompute=true, training.offload=true, a smaller dataset.max_length (with batching.tokens), "
        "optimizer=paged_adamw_8bit, recipe=qlora. Checkpoints made before are kept: resume=auto goes on where "
        "the settings allow it; docs/out-of-memory.md says which do."
    )


class TooLargeTogether(Unfinished):
    """A micro-batch that cannot be made again, because other processes are in the middle of it."""

    def __init__(self, what: str, depth: int) -> None:
        self.depth = depth  # how often the next start halves micro-batches
        super().__init__(
            f"out of memory: {what} does not fit, and with parallel=fsdp it cannot be made again while the other "
            "processes are in the middle of it. Start the same run again with resume=auto: from its last checkpoint "
            f"on micro-batches are split by documents then, into up to {2**depth} parts. The gradient is the same. A "
            "smaller batching.tokens (or batching.rows) with more batching.accumulation is faster."
        )


@contextmanager
def told_where_it_ends_a_run() -> Iterator[None]:
    """Around what is not made in parts: loading weights, proofs, a save."""
    try:
        yield
    except torch.OutOfMemoryError as fault:
        raise does_not_fit("what this run needs outside of its steps", {}) from fault


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
        token_type_ids=None if batch.token_type_ids is None else batch.token_type_ids[:, columns],
        documents=None
        if whole is None
        else PackedSequences.from_lengths(lengths, whole.max_seqlen, len(whole.cu_seqlens) - 1),
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
        token_type_ids=None if batch.token_type_ids is None else batch.token_type_ids[rows, columns],
        documents=None if batch.documents is None else PackedSequences.from_lengths(parts),
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


def _weights(batch: Batch, chosen: Tensor) -> LossWeights | None:
    if batch.weights is None:
        return None
    each = batch.weights.per_target[chosen]
    return LossWeights(each, float(each.sum(dtype=torch.float64)))
