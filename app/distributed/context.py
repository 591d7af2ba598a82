"""Context parallelism: the ranks of a group read the same rows, and each computes one slice of their tokens.

Attention needs all tokens of a document. Before it, an all-to-all exchanges slices of tokens for slices of heads
(DeepSpeed Ulysses): each rank gets all tokens of its heads, so the bounds of packed documents stay valid. After it, a
second one returns the slice of tokens with all heads.

Labels are shifted when rows are tokenized, before they are sliced. So the loss sums and gradients of all ranks add up
to those of the whole rows, as with data parallelism.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from app.batch import IGNORE, Batch, LossWeights
from app.errors import ConfigError


def readers_of(processes: int, context: int) -> int:
    """Return the number of groups that read different rows, each of `context` processes."""
    if processes % context:
        count = -(-processes // context) * context
        raise ConfigError(
            f"parallel.context={context} needs a multiple of {context} processes, but the run has {processes}. "
            f"Set launch.num_processes={count}, or parallel.context=1."
        )
    return processes // context


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """Ranks that share rows. `group`: their process group; None for a memory plan, which only needs the sizes."""

    index: int
    size: int
    group: Any = None

    def to_heads(self, tokens: Tensor) -> Tensor:
        """Return all tokens of the heads of this rank, [1, H / size, S, D], from its tokens, [1, H, S / size, D]."""
        heads: Tensor = _Exchange.apply(self, _to_heads, _to_tokens, tokens)  # type: ignore[no-untyped-call]
        return heads

    def to_tokens(self, heads: Tensor) -> Tensor:
        """Return the tokens of this rank with all heads: the inverse of `to_heads`."""
        tokens: Tensor = _Exchange.apply(self, _to_tokens, _to_heads, heads)  # type: ignore[no-untyped-call]
        return tokens

    def part(self, batch: Batch, device: torch.device) -> Batch:
        """Return the slice of this rank on the device; `lengths` and `documents` are those of the whole row.

        A row whose length is not a multiple of the ranks gets a document of padding.
        """
        bounds = self._label_bounds(batch)
        first, last = bounds[self.index], bounds[self.index + 1]
        width = self._width(batch)
        start, padding = self.index * width, width * self.size - batch.ids.shape[1]
        weights, whole = batch.weights, batch.to(device)
        labels = slice(first, last)
        assert whole.documents is not None, "only packed rows are sliced"
        documents = replace(whole.documents, exchange=self)
        if padding:
            bounds_on_device = F.pad(documents.cu_seqlens, (0, 1), value=width * self.size)
            lengths = (*documents.lengths, padding)
            documents = replace(documents, lengths=lengths, cu_seqlens=bounds_on_device)
        has_labels = last > first
        return replace(
            whole,
            ids=F.pad(whole.ids, (0, padding))[:, start : start + width],
            positions=F.pad(whole.positions, (0, padding))[:, start : start + width],
            label_rows=whole.label_rows[labels] - start if has_labels else whole.label_rows.new_zeros(1),
            targets=whole.targets[labels] if has_labels else whole.targets.new_full((1,), IGNORE),
            num_labels=last - first,
            num_tokens=min(max(batch.num_tokens - start, 0), width),
            documents=documents,
            weights=None
            if weights is None or whole.weights is None or not has_labels
            else LossWeights(whole.weights.per_target[labels], float(weights.per_target[labels].sum())),
        )

    def gathered(self, of_labels: Tensor, batch: Batch) -> Tensor:
        """Return the values of all labels of `batch` in order, from those of the labels of each rank."""
        counts = [last - first for first, last in pairwise(self._label_bounds(batch))]
        mine = F.pad(of_labels[: counts[self.index]], (0, max(counts) - counts[self.index]))
        by_rank = [torch.empty_like(mine) for _ in counts]
        dist.all_gather(by_rank, mine, group=self.group)
        return torch.cat([values[:count] for values, count in zip(by_rank, counts, strict=True)])

    def sum_in_place(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)

    def _width(self, batch: Batch) -> int:
        return -(-batch.ids.shape[1] // self.size)

    def _label_bounds(self, batch: Batch) -> list[int]:
        """Return the first label of each slice, and the number of labels, from a batch in host memory."""
        edges = torch.arange(self.size + 1) * self._width(batch)
        bounds: list[int] = torch.searchsorted(batch.label_rows[: batch.num_labels].cpu(), edges).tolist()
        return bounds

    def exchanged(self, tensor: Tensor) -> Tensor:
        """Send part i of dimension 0 to rank i, and return the parts from all ranks."""
        sent = tensor.contiguous()
        if self.group is None:
            return sent.clone()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received


def context_group(context: int, processes: int, rank: int) -> ContextGroup | None:
    """Connect this process to its group of consecutive ranks; None if each process reads rows of its own."""
    groups = readers_of(processes, context)
    if context == 1:
        return None
    members = [dist.new_group(range(first, first + context)) for first in range(0, groups * context, context)]
    return ContextGroup(rank % context, context, members[rank // context])


def _to_heads(context: ContextGroup, tokens: Tensor) -> Tensor:
    received = context.exchanged(tokens[0].unflatten(0, (context.size, -1)))  # [slices, H / size, S / size, D]
    return received.transpose(0, 1).flatten(1, 2)[None]


def _to_tokens(context: ContextGroup, heads: Tensor) -> Tensor:
    received = context.exchanged(heads[0].unflatten(1, (context.size, -1)).transpose(0, 1))
    return received.flatten(0, 1)[None]  # the heads of one rank after those of another


_Exchanged = Callable[[ContextGroup, Tensor], Tensor]


class _Exchange(torch.autograd.Function):
    """Apply one exchange in the forward pass, and its inverse to the gradient."""

    @staticmethod
    def forward(ctx: Any, context: ContextGroup, exchange: _Exchanged, inverse: _Exchanged, tensor: Tensor) -> Tensor:
        ctx.context, ctx.inverse = context, inverse
        return exchange(context, tensor)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[None, None, None, Tensor]:
        return None, None, None, ctx.inverse(ctx.context, upstream[0])
