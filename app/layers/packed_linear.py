"""Frozen linear layers with 4-bit weights in the layouts of published models.

Each byte stores the 4-bit codes of two consecutive inputs, the first in the low bits. A code is an index into a table
of numbers, and the inputs in a group share a scale and a zero point: a weight is `(number - zero) * scale`.

MXFP4 and NVFP4 use the numbers of E2M1. MXFP4 has a power-of-two scale for every 32 inputs (E8M0), NVFP4 an E4M3 scale
for every 16 inputs and a global scale. These scales are stored as bytes, so casting a network does not change them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from app.layers.frozen_linear import DequantizedLinear
from app.layers.operations import COSTS, OperationCost

INT4, MXFP4, NVFP4 = "int4", "mxfp4", "nvfp4"
GROUPS = {MXFP4: 32, NVFP4: 16}  # inputs that share a scale
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = (*_POSITIVE, *(-number for number in _POSITIVE))
_NUMBERS = {INT4: tuple(range(-8, 8)), MXFP4: _E2M1, NVFP4: _E2M1}  # of the codes 0 to 15
_SCALES = {MXFP4: torch.float8_e8m0fnu, NVFP4: torch.float8_e4m3fn}  # formats of scales stored as bytes


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out, in] in 4 bits."""

    numbers: str  # a key of _NUMBERS
    codes: Tensor  # bytes [out, in / 2]
    scale: Tensor  # [out, groups], or bytes
    zero: Tensor | None = None  # int8 [out, groups]
    group: Tensor | None = None  # int32 [in], the group of each input; None: groups of consecutive inputs
    global_scale: Tensor | None = None  # bytes [out, 8] of a float64 per output, which multiplies its scales

    def to(self, device: torch.device) -> "PackedWeight":
        """Return the weight on `device`."""
        moved = {name: part.to(device) for name in ("codes", *_PARTS) if (part := getattr(self, name)) is not None}
        return replace(self, **moved)

    def scales(self) -> Tensor:
        """Return the scales [out, groups] in float32."""
        return _scales(self.scale, self.global_scale, self.numbers)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight [out, in], multiplied in float32 and rounded once."""
        return unpack(self.codes, self.scale, self.zero, self.group, self.global_scale, self.numbers, dtype)


_PARTS = ("scale", "zero", "group", "global_scale")  # of a packed weight, other than its codes


def codes_in(words: Tensor) -> Tensor:
    """Return the codes [..., 8 n] in int32 [..., n], the first in the lowest bits of each."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)


def paired(codes: Tensor) -> Tensor:
    """Return codes [out, in] as bytes [out, in / 2]."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def round_to_int4(weight: Tensor, group: int, scale_dtype: torch.dtype) -> PackedWeight:
    """Return a weight [out, in] rounded to nearest, without zero points."""
    groups = weight.float().unflatten(1, (-1, group))
    scale = (groups.abs().amax(-1, keepdim=True) / 7.5).to(scale_dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = (groups / scale.float()).clamp_(-8, 7).round_().add_(8).to(torch.uint8).flatten(1)
    return PackedWeight(INT4, paired(codes), scale[..., 0])


def global_scales(scale: Tensor, outputs: int) -> Tensor:
    """Return a float64 scale as bytes, repeated for all outputs.

    In float64 a division by a float32 scale can be stored as a factor: the float32 product with an E4M3 number is the
    same as its quotient.
    """
    return scale.double().reshape(1, 1).expand(outputs, 1).contiguous().view(torch.uint8)


def round_to_mxfp4(weight: Tensor) -> PackedWeight:
    """Return a weight [out, in] rounded to nearest, with the scales of compressed-tensors: the largest number of a
    group is at most 7 times its scale, and becomes 6 or less.
    """
    groups = weight.float().unflatten(1, (-1, GROUPS[MXFP4]))
    bits = groups.abs().amax(-1).view(torch.int32)
    exponent = bits + (1 << 21) >> 23  # of the largest number with 1.75 rounded up to 2
    scale = (exponent - 2).clamp_(0, 254).to(torch.uint8)
    return PackedWeight(MXFP4, _codes(groups, _scales(scale, None, MXFP4)), scale)


def round_to_nvfp4(weight: Tensor) -> PackedWeight:
    """Return a weight [out, in] rounded to nearest, with the largest scale at the largest number of E4M3."""
    groups = weight.float().unflatten(1, (-1, GROUPS[NVFP4]))
    largest = groups.abs().amax(-1)
    # a GPU would multiply by the reciprocal of a Python number: tensors give the same numbers on both
    factor = largest.amax() / torch.full_like(largest[:1, 0], 6 * 448)
    factor = torch.where(factor == 0, torch.ones_like(factor), factor)
    rounded = (largest / (6 * factor)).to(torch.float8_e4m3fn)
    scale = torch.where(rounded.float() == 0, torch.ones_like(largest), rounded.float()).to(rounded.dtype)
    stored, of_rows = scale.view(torch.uint8), global_scales(factor, len(weight))
    return PackedWeight(NVFP4, _codes(groups, _scales(stored, of_rows, NVFP4)), stored, global_scale=of_rows)


def _codes(groups: Tensor, scale: Tensor) -> Tensor:
    """Return the bytes of the nearest numbers of E2M1; numbers halfway between two get the even code."""
    numbers = (groups / scale[..., None]).flatten(1)
    halfway = torch.tensor([(low + high) / 2 for low, high in pairwise(_POSITIVE)], device=numbers.device)
    below = torch.nextafter(halfway, torch.zeros_like(halfway))
    above_even = torch.arange(len(halfway), device=numbers.device) % 2 == 0
    codes = torch.bucketize(numbers.abs(), torch.where(above_even, halfway, below), out_int32=True)
    return paired(codes.to(torch.uint8) | numbers.signbit().to(torch.uint8) << 3)


class PackedLinear(DequantizedLinear):
    """A 4-bit weight as stored in the files of a model, dequantized on use."""

    scale: Tensor
    zero: Tensor | None
    group: Tensor | None
    global_scale: Tensor | None

    def __init__(self, packed: PackedWeight, bias: nn.Parameter | None) -> None:
        outputs, half = packed.codes.shape
        super().__init__(torch.empty(outputs, 2 * half, device="meta"), bias)
        self.numbers = packed.numbers
        self.weight = nn.Parameter(packed.codes, requires_grad=False)
        for name in _PARTS:
            self.register_buffer(name, getattr(packed, name))

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        return unpack(self.weight, self.scale, self.zero, self.group, self.global_scale, self.numbers, dtype)


# ---- dequantization


_PIECE = {"cpu": 1 << 20, "cuda": 1 << 23}  # weights that are float32 at a time


@cache
def _pairs(numbers: str, device: torch.device) -> Tensor:
    """Return the two numbers of each byte [256, 2]."""
    table = torch.tensor(_NUMBERS[numbers], dtype=torch.float32, device=device)
    byte = torch.arange(256, device=device)
    return table[torch.stack((byte & 15, byte >> 4), -1)]


def _rows_of_piece(codes: Tensor, kind: str) -> int:
    return min(len(codes), max(1, _PIECE[kind] // (2 * codes.shape[1])))


def _scales(scale: Tensor, global_scale: Tensor | None, numbers: str) -> Tensor:
    """Return the scales in float32."""
    wide = scale.view(_SCALES[numbers]).float() if numbers in _SCALES else scale.float()
    return wide if global_scale is None else (wide * global_scale.view(torch.float64)).float()


def _dequantize(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    group: Tensor | None,
    global_scale: Tensor | None,
    numbers: str,
    dtype: torch.dtype,
) -> Tensor:
    weight = codes.new_empty((len(codes), 2 * codes.shape[1]), dtype=dtype)
    rows = _rows_of_piece(codes, codes.device.type)
    for start in range(0, len(codes), rows):
        part = slice(start, start + rows)
        zeros, of_rows = (None if tensor is None else tensor[part] for tensor in (zero, global_scale))
        weight[part] = _piece(codes[part], scale[part], zeros, group, of_rows, numbers)
    return weight


def _piece(
    codes: Tensor, scale: Tensor, zero: Tensor | None, group: Tensor | None, global_scale: Tensor | None, numbers: str
) -> Tensor:
    """Return some rows in float32."""
    weight = F.embedding(codes.int(), _pairs(numbers, codes.device)).flatten(1)
    scale = _scales(scale, global_scale, numbers)
    if group is not None:
        scale, zero = scale[:, group], None if zero is None else zero[:, group]
    groups = weight.unflatten(1, (scale.shape[1], -1))
    if zero is not None:
        groups.sub_(zero[..., None])
    groups.mul_(scale[..., None])
    return weight


def _bytes(codes: Tensor, _scale: Tensor, _zero: Tensor | None, group: Tensor | None, *_others: Any, kind: str) -> int:
    """Return the bytes of a piece in float32 with its codes in int32, or with a scale and a zero point per weight."""
    return _rows_of_piece(codes, kind) * codes.shape[1] * 2 * (6 if group is None else 11)


_OPS = torch.library.Library("app_kernels", "FRAGMENT")
_OPS.define(
    "dequantize_packed(Tensor codes, Tensor scale, Tensor? zero, Tensor? group, Tensor? global_scale, str numbers, "
    "ScalarType dtype) -> Tensor"
)
for _device in ("CPU", "CUDA"):
    _OPS.impl("dequantize_packed", _dequantize, _device)
torch.library.register_fake(
    "app_kernels::dequantize_packed",
    lambda codes, _scale, _zero, _group, _global_scale, _numbers, dtype: codes.new_empty(
        (len(codes), 2 * codes.shape[1]), dtype=dtype
    ),
    lib=_OPS,
)
COSTS["app_kernels::dequantize_packed"] = OperationCost(
    cpu_bytes=partial(_bytes, kind="cpu"), gpu_bytes=partial(_bytes, kind="cuda")
)
unpack: Callable[..., Tensor] = torch.ops.app_kernels.dequantize_packed
