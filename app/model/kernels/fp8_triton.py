# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Rows rounded to e4m3 in one launch, each read once by one program. Imported late: triton may be missing."""

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 1 << 16  # numbers of a row that one program can hold


@triton.jit
def _rows(rows, out, scales, width, LEAST: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """What is not a number stays so: the least and the largest of plain kernels would drop it."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    known = at < width
    x = tl.load(rows + row * width + at, mask=known, other=0.0).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(x), axis=0), LEAST)
    factor = tl.div_rn(tl.full((), LARGEST, tl.float32), most)
    y = tl.clamp(x * factor, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + row * width + at, y.to(out.dtype.element_ty), mask=known)
    tl.store(scales + row, most * (1 / LARGEST))


def quantize_rows(rows: Tensor, out: Tensor, scales: Tensor, least: float, largest: float) -> None:
    """Rows [n, k] into `out`, of the dtype that they are rounded to, and `scales` [n, 1]; all contiguous."""
    count, width = rows.shape
    block = triton.next_power_of_2(width)
    # so that a thread has no more numbers than registers
    warps = min(max(block // 512, 4), 16) if block <= WIDEST // 2 else 32
    known = {"LEAST": least, "LARGEST": largest, "BLOCK": block, "num_warps": warps}
    with torch.cuda.device_of(rows):
        _rows[(count,)](rows, out, scales, width, **known)
