# ruff: noqa: N803, PLR0913, PLR0917 (a kernel has many arguments, and constants among them)
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton kernels: in-place cross-entropy and gradient, rounding of rows to e4m3. Imported late: triton is optional."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.batch import IGNORE

_MAX_BLOCK = 8192  # logits per block of a program
MAX_WIDTH = 1 << 16  # row length that one program can round


@triton.jit
def loss_and_grad_kernel(
    logits,
    targets,
    weights,
    losses,
    stride,
    vocabulary,
    width,
    WEIGHTED: tl.constexpr,
    GRADIENT: tl.constexpr,
    IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the cross-entropy of one row of logits, which its gradient may replace.

    Loads are masked by `width`, a multiple of 64 or else the vocabulary: an odd number would be loaded one by one.
    """
    row = tl.program_id(0).to(tl.int64)  # rows times vocabulary exceeds 32 bits
    start = logits + row * stride
    columns = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    counts = target != IGNORED
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weights + row)
    label_logit = tl.load(start + target, mask=counts, other=0.0).to(tl.float32)  # before it is overwritten
    largest = -float("inf")
    total = 0.0
    for at in range(0, width, BLOCK):
        x = tl.load(start + at + columns, mask=at + columns < width, other=-float("inf")).to(tl.float32)
        x = tl.where(at + columns < vocabulary, x, -float("inf"))
        now = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - now) + tl.sum(tl.exp(x - now), 0)
        largest = now
    loss = ((largest - label_logit) + tl.log(total)) * weight
    tl.store(losses + row, tl.where(counts, loss, 0.0))
    if GRADIENT:
        factor = weight / total
        for at in range(0, width, BLOCK):
            inside = at + columns < width
            x = tl.load(start + at + columns, mask=inside, other=0.0).to(tl.float32)
            x = tl.where(at + columns < vocabulary, x, -float("inf"))
            gradient = tl.exp(x - largest) * factor - tl.where(at + columns == target, weight, 0.0)
            gradient = tl.where(counts, gradient, 0.0)
            tl.store(start + at + columns, gradient.to(logits.dtype.element_ty), mask=inside)


def loss_and_grad(
    logits: Tensor, targets: Tensor, weights: Tensor | None, losses: Tensor, gradient: bool, width: int | None = None
) -> None:
    """Launch one program per row; see `operations.loss_and_grad_inplace`."""
    rows, vocabulary = logits.shape
    if not rows:
        return
    block = min(_MAX_BLOCK, triton.next_power_of_2(vocabulary))
    with torch.cuda.device_of(logits):
        loss_and_grad_kernel[(rows,)](
            logits,
            targets,
            losses if weights is None else weights,
            losses,
            logits.stride(0),
            vocabulary,
            width or vocabulary,
            WEIGHTED=weights is not None,
            GRADIENT=gradient,
            IGNORED=IGNORE,
            BLOCK=block,
            num_warps=max(1, min(16, block // 512)),
        )


@triton.jit
def quantize_rows_kernel(rows, out, scales, width, LEAST: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Round one row to e4m3. NaN stays NaN: tl.maximum and a plain clamp would drop it."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(rows + row * width + at, mask=inside, other=0.0).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(x), axis=0), LEAST)
    factor = tl.div_rn(tl.full((), LARGEST, tl.float32), most)
    y = tl.clamp(x * factor, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + row * width + at, y.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, most * (1 / LARGEST))


def quantize_rows(rows: Tensor, out: Tensor, scales: Tensor, least: float, largest: float) -> None:
    """Round rows [n, k] into `out`, in its dtype, and `scales` [n, 1]; all contiguous."""
    count, width = rows.shape
    block = triton.next_power_of_2(width)
    # not more numbers than registers per thread
    warps = min(max(block // 512, 4), 16) if block <= MAX_WIDTH // 2 else 32
    with torch.cuda.device_of(rows):
        quantize_rows_kernel[(count,)](
            rows, out, scales, width, LEAST=least, LARGEST=largest, BLOCK=block, num_warps=warps
        )
