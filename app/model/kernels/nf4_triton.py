# ruff: noqa: N803, PLR0913, PLR0917 (a kernel has many arguments, and constants among them)
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Weights of four bits unpacked in one launch, their scales with them. Imported late: triton may be missing."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.model.kernels.nf4 import Packed

_BLOCKS = 32  # of weights, for each program: a thread then writes what it read, 16 bytes at once


@triton.jit
def _unpack(
    packed,
    scales,
    second,
    second_code,
    offset,
    code,
    out,
    count,
    NESTED: tl.constexpr,
    HALF: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    known = block * (2 * HALF) < count
    if NESTED:
        index = tl.load(scales + block, mask=known, other=0).to(tl.int32)
        of_scales = tl.load(second + block // SECOND, mask=known, other=0.0)
        scale = tl.load(second_code + index) * of_scales + tl.load(offset)
    else:
        scale = tl.load(scales + block, mask=known, other=0.0)
    byte = block[:, None] * HALF + tl.arange(0, HALF)[None, :]
    both = tl.load(packed + byte, mask=byte * 2 < count, other=0).to(tl.int32)
    first = tl.load(code + (both >> 4)) * scale[:, None]
    other = tl.load(code + (both & 15)) * scale[:, None]
    at = block[:, None] * (2 * HALF) + tl.arange(0, 2 * HALF)[None, :]
    values = tl.interleave(first, other).to(out.dtype.element_ty)
    tl.store(out + at, values, mask=at < count)


def unpack(packed: Packed, out: Tensor) -> None:
    """Into `out`, which is contiguous and of the dtype that is wanted."""
    nested = packed.second is not None
    scales = packed.scales
    per_program = _BLOCKS * packed.block
    with torch.cuda.device_of(out):
        _unpack[(triton.cdiv(out.numel(), per_program),)](
            packed.data,
            scales,
            packed.second if nested else scales,
            packed.second_code if nested else scales,
            packed.offset if nested else scales,
            packed.code,
            out,
            out.numel(),
            NESTED=nested,
            HALF=packed.block // 2,
            SECOND=packed.second_block,
            BLOCKS=_BLOCKS,
            num_warps=8,
            enable_fp_fusion=False,  # a product and a sum in one rounding would be other bits than bitsandbytes'
        )
