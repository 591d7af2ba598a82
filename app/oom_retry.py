"""Retry after OOM: a batch is split between data rows, and its parts give the same sums."""

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

Result = TypeVar("Result")

# messages of OOM errors other than torch.OutOfMemoryError, from other allocators
_OUT_OF_MEMORY = (
    "CUDA error: out of memory",  # contexts, pinned memory, loading of kernels
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
    "DefaultCPUAllocator: can't allocate memory",
)


def is_out_of_memory(fault: BaseException) -> bool:
    """Return whether an error is an OOM error."""
    if isinstance(fault, torch.OutOfMemoryError):
        return True
    return isinstance(fault, RuntimeError) and any(words in str(fault) for words in _OUT_OF_MEMORY)


def try_or_none(work: Callable[..., Result], *arguments: Any) -> Result | None:
    """Call `work`; return None if it ran out of memory, after its allocations are freed."""
    try:
        return work(*arguments)
    except RuntimeError as fault:
        if not is_out_of_memory(fault):
            raise
        # no retry here: the exception keeps the tensors of its frames alive
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def out_of_memory_error(what: str, sizes: Mapping[str, int]) -> EnvironmentProblem:
    """Return the error that ends a run. `sizes` has the bytes allocated between steps, by part."""
    parts = ", ".join(f"{name.replace('_', ' ')} {size / 1e9:.2f} GB" for name, size in sizes.items() if size)
    addition = f" next to the memory kept between steps ({parts})" if parts else ""
    return EnvironmentProblem(
        f"out of memory: {what} does not fit{addition}. Cheapest options first: "
        "training.recompute=true, training.tile=2048, training.offload=true, a smaller dataset.max_length (with "
        "batching.tokens), optimizer=paged_adamw_8bit, recipe=qlora. Earlier checkpoints are kept: resume=auto resumes "
        "them with the settings listed in docs/problems.md."
    )


class RetryOnRestart(Unfinished):
    """OOM in a pass that other processes are in, so it cannot be repeated: the next start splits deeper."""

    def __init__(self, what: str, depth: int) -> None:
        self.depth = depth  # of splits in the next start
        super().__init__(
            f"out of memory: {what} does not fit, and it cannot be repeated while the other "
            "processes are in the same pass. Run the same command again with resume=auto: it resumes from the last "
            f"checkpoint, with micro-batches split by document into up to {2**depth} parts. The gradient is the same. "
            "A smaller batching.tokens (or batching.rows) with more batching.accumulation is faster."
        )


@contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """Convert OOM to a user error where the batch cannot be split: loading weights, checks, checkpoints."""
    try:
        yield
    except RuntimeError as fault:
        if not is_out_of_memory(fault):
            raise
        raise out_of_memory_error("memory needed outside of training steps", {}) from fault


def split_batch(batch: Batch, depth: int) -> list[Batch]:
    """Halve `depth` times if possible; parts without labels are dropped."""
    parts = [batch]
    for _ in range(depth):
        parts = [half for part in parts for half in halve(part) or [part]]
    return [part for part in parts if part.num_labels] or parts[:1]


def halve(batch: Batch) -> list[Batch]:
    """Split between data rows: two halves, one part without padding for a single row, or none."""
    count = len(batch.documents_of_rows)
    if count > 1:
        tokens = list(accumulate(batch.lengths))
        sums = [tokens[end - 1] for end in accumulate(batch.documents_of_rows)]
        cut = 1 + min(range(count - 1), key=lambda i: abs(2 * sums[i] - sums[-1]))  # about half of the tokens
        return [_part(batch, 0, cut), _part(batch, cut, count)]
    if count == 1 and sum(batch.lengths) < batch.ids.numel() and max(batch.lengths) < batch.ids.shape[1]:
        return [_part(batch, 0, 1)]
    return []


def few_rows(batch: Batch, count: int) -> Batch:
    """Return the first `count` consecutive data rows with a label, or the batch if it has no more rows."""
    spare = len(batch.documents_of_rows) - count
    if spare <= 0:
        return batch
    parts = (_part(batch, first, first + count) for first in range(spare + 1))
    return next((part for part in parts if part.num_labels), _part(batch, 0, count)).to(batch.ids.device)


def in_parts_that_fit(batch: Batch, work: Callable[[Batch], Result]) -> Iterator[tuple[Batch, Result]]:
    """Yield the results of `work` on the batch, or on its parts in order, halved until they fit."""
    queue = [batch]
    while queue:
        part = queue.pop()
        result = try_or_none(work, part)
        if result is not None:
            yield part, result
            continue
        queue += reversed(require_halves(part))


def require_halves(part: Batch) -> list[Batch]:
    """Split an eval batch; raise if a single document does not fit."""
    smaller = halve(part)
    if not smaller:
        raise out_of_memory_error(f"a single document of {part.num_tokens} tokens in an evaluation", {})
    return smaller


def _part(batch: Batch, first: int, last: int) -> Batch:
    """Return the data rows from `first` up to `last`, exclusive."""
    ends = list(accumulate(batch.documents_of_rows, initial=0))
    cut = _of_one_line if batch.ids.shape[0] == 1 else _of_lines
    part = cut(batch, ends[first], ends[last])
    return replace(part, rows=batch.rows[first:last], samples=batch.samples[first:last])


def _of_one_line(batch: Batch, first: int, last: int) -> Batch:
    begin, lengths, whole = batch.starts[first], batch.lengths[first:last], batch.documents
    end = begin + sum(lengths)
    columns = slice(begin, end)
    inside = (batch.label_rows >= begin) & (batch.label_rows < end)
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


def _of_lines(batch: Batch, first: int, last: int) -> Batch:
    before, lengths = batch.ids.shape[1], batch.lengths[first:last]
    width = max(lengths)
    lines, columns = slice(first, last), slice(0, width)
    line, column = batch.label_rows // before, batch.label_rows % before
    parts = [part for n in lengths for part in (n, width - n) if part]
    cut = replace(
        batch,
        ids=batch.ids[lines, columns],
        positions=batch.positions[lines, columns],
        token_type_ids=None if batch.token_type_ids is None else batch.token_type_ids[lines, columns],
        documents=None if batch.documents is None else PackedSequences.from_lengths(parts),
    )
    inside = (line >= first) & (line < last)
    return _with_labels(cut, batch, (first, last), inside, (line - first) * width + column)


def _with_labels(cut: Batch, batch: Batch, documents: tuple[int, int], inside: Tensor, places: Tensor) -> Batch:
    """Return the part with its labels; `places` are the positions of all labels of the batch in the part."""
    chosen = inside & (torch.arange(len(inside), device=inside.device) < batch.num_labels)
    labels = int(chosen.sum())
    first, last = documents
    lengths = batch.lengths[first:last]
    weights, document_of_label = batch.weights, batch.document_of_label
    if weights is not None:
        per_target = weights.per_target[chosen]
        weights = LossWeights(per_target, float(per_target.sum(dtype=torch.float64)))
    if document_of_label is not None:
        document_of_label = document_of_label[chosen] - first if labels else torch.full((1,), last - first)
    return replace(
        cut,
        label_rows=places[chosen] if labels else torch.zeros(1, dtype=batch.label_rows.dtype),
        targets=batch.targets[chosen] if labels else batch.targets.new_full((1, *batch.targets.shape[1:]), IGNORE),
        lengths=lengths,
        num_labels=labels,
        num_tokens=sum(lengths),
        weights=weights if labels else None,
        document_of_label=document_of_label,
        document_values=None if batch.document_values is None else batch.document_values[first:last],
    )
