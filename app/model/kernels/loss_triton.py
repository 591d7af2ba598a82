# ruff: noqa: N803, PLR0913, PLR0917 (a kernel has many arguments, and constants among them)
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Logits into losses and gradients, in place, one program for each row. Imported late: triton may be missing."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.batch import IGNORE

_MOST = 8192  # logits that a program has at once


@triton.jit
def _spend(
    logits,
    targets,
    weights,
    losses,
    stride,
    vocabulary,
    WEIGHTED: tl.constexpr,
    GRADIENT: tl.constexpr,
    IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # rows times vocabulary is more than 32 bits hold
    start = logits + row * stride
    columns = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    counts = target != IGNORED
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weights + row)
    wanted = tl.load(start + target, mask=counts, other=0.0).to(tl.float32)  # before it is written over
    largest = -float("inf")
    total = 0.0
    for at in range(0, vocabulary, BLOCK):
        x = tl.load(start + at + columns, mask=at + columns < vocabulary, other=-float("inf")).to(tl.float32)
        now = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - now) + tl.sum(tl.exp(x - now), 0)
        largest = now
    loss = ((largest - wanted) + tl.log(total)) * weight
    tl.store(losses + row, tl.where(counts, loss, 0.0))
    if GRADIENT:
        factor = weight / total
        for at in range(0, vocabulary, BLOCK):
            inside = at + columns < vocabulary
            x = tl.load(start + at + columns, mask=inside, other=0.0).to(tl.float32)
            gradient = tl.exp(x - largest) * factor - tl.where(at + columns == target, weight, 0.0)
            gradient = tl.where(counts, gradient, 0.0)
            tl.store(start + at + columns, gradient.to(logits.dtype.element_ty), mask=inside)


def spend(logits: Tensor, targets: Tensor, weights: Tensor | None, losses: Tensor, *, gradient: bool) -> None:
    """As the plain one does."""
    rows, vocabulary = logits.shape
    if not rows:
        return
    block = min(_MOST, triton.next_power_of_2(vocabulary))
    with torch.cuda.device_of(logits):
        _spend[(rows,)](
            logits,
            targets,
            losses if weights is None else weights,
            losses,
            logits.stride(0),
            vocabulary,
            WEIGHTED=weights is not None,
            GRADIENT=gradient,
            IGNORED=IGNORE,
            BLOCK=block,
            num_warps=max(1, min(16, block // 512)),
        )
