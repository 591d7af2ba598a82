# ruff: noqa: N803, PLR0913, PLR0917 (a kernel has many arguments, and constants among them)
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Rows rounded to e4m3 in one launch, with what makes them. Imported late: triton may be missing.

`silu_mul_quantize` and `norm_quantize` round rows as they are made; the rows themselves are given too.

Each program has a whole row, so that its largest number and what is rounded with it are read once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 1 << 16  # numbers of a row that one program can hold


@triton.jit
def _round(x, known, out, scales, row, at, width, LEAST: tl.constexpr, LARGEST: tl.constexpr):
    """What is not a number stays so: the least and the largest of plain kernels would drop it."""
    most = tl.max(tl.abs(x), axis=0)
    most = tl.maximum(most, LEAST)
    factor = tl.div_rn(tl.full((), LARGEST, tl.float32), most)
    y = tl.clamp(x * factor, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + row * width + at, y.to(out.dtype.element_ty), mask=known)
    tl.store(scales + row, most * (1 / LARGEST))


@triton.jit
def _rows(rows, out, scales, width, LEAST: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    known = at < width
    x = tl.load(rows + row * width + at, mask=known, other=0.0).to(tl.float32)
    _round(x, known, out, scales, row, at, width, LEAST, LARGEST)


@triton.jit
def _gated(
    gate, up, opened, out, scales, width, LEAST: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    known = at < width
    g = tl.load(gate + row * width + at, mask=known, other=0.0).to(tl.float32)
    u = tl.load(up + row * width + at, mask=known, other=0.0)
    kind = opened.dtype.element_ty
    # as torch does it: the activation is rounded before it is multiplied, and the product again
    a = (g / (1.0 + tl.exp(-g))).to(kind).to(tl.float32)
    h = (a * u.to(tl.float32)).to(kind)
    tl.store(opened + row * width + at, h, mask=known)
    _round(h.to(tl.float32), known, out, scales, row, at, width, LEAST, LARGEST)


@triton.jit
def _normed(
    rows,
    gain,
    normed,
    roots,
    out,
    scales,
    width,
    EPS: tl.constexpr,
    WAY: tl.constexpr,
    LEAST: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    known = at < width
    x = tl.load(rows + row * width + at, mask=known, other=0.0).to(tl.float32)
    w = tl.load(gain + at, mask=known, other=0.0).to(tl.float32)
    kind = normed.dtype.element_ty
    root = tl.rsqrt(tl.sum(x * x, axis=0) / width + EPS)
    tl.store(roots + row, root)
    y = x * root
    # kernels.norms.WAYS: rounded before the gain, and after it again; after it alone; one more than the gain
    if WAY == 0:
        y = y.to(kind).to(tl.float32) * w
    elif WAY == 1:
        y = y * w
    else:
        y = y * (1.0 + w)
    h = y.to(kind)
    tl.store(normed + row * width + at, h, mask=known)
    _round(h.to(tl.float32), known, out, scales, row, at, width, LEAST, LARGEST)


def quantize_rows(rows: Tensor, out: Tensor, scales: Tensor, least: float, largest: float) -> None:
    """Rows [n, k] into `out`, of the dtype that they are rounded to, and `scales` [n, 1]; all contiguous."""
    count, width = rows.shape
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(rows):
        _rows[(count,)](
            rows, out, scales, width, LEAST=least, LARGEST=largest, BLOCK=block, num_warps=_warps(block)
        )


def silu_mul_quantize(
    gate: Tensor, up: Tensor, opened: Tensor, out: Tensor, scales: Tensor, least: float, largest: float
) -> None:
    """silu(gate) * up into `opened`, and rounded as above; `opened` may be `up`."""
    count, width = gate.shape
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(gate):
        _gated[(count,)](
            gate,
            up,
            opened,
            out,
            scales,
            width,
            LEAST=least,
            LARGEST=largest,
            BLOCK=block,
            num_warps=_warps(block),
        )


def norm_quantize(
    rows: Tensor,
    gain: Tensor,
    eps: float,
    way: int,
    normed: Tensor,
    roots: Tensor,
    out: Tensor,
    scales: Tensor,
    least: float,
    largest: float,
) -> None:
    """The root-mean-square norm of rows in any leading shape into `normed`, what each was multiplied by into `roots`.

    Rounded as above. `way` is a place in kernels.norms.WAYS.
    """
    width = rows.shape[-1]
    count = rows.numel() // width
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(rows):
        _normed[(count,)](
            rows,
            gain,
            normed,
            roots,
            out,
            scales,
            width,
            EPS=eps,
            WAY=way,
            LEAST=least,
            LARGEST=largest,
            BLOCK=block,
            num_warps=_warps(block),
        )


def _warps(block: int) -> int:
    """So that a thread has no more numbers than registers."""
    return min(max(block // 512, 4), 16) if block <= WIDEST // 2 else 32
