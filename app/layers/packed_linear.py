"""Frozen linear layers with 4-bit weights in the layouts of published models.

A byte has the codes of two consecutive inputs, the first in its low bits. A code stands for a number of a table, and
inputs in a group share a scale and a zero point: a weight is `(number - zero) * scale`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from app.layers.frozen_linear import DequantizedLinear
from app.layers.operations import COSTS, OperationCost

INT4 = "int4"
_NUMBERS = {INT4: tuple(range(-8, 8))}  # of the codes 0 to 15


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out, in] in 4 bits."""

    numbers: str  # a key of _NUMBERS
    codes: Tensor  # bytes [out, in / 2]
    scale: Tensor  # [out, groups]
    zero: Tensor | None = None  # int8 [out, groups]
    group: Tensor | None = None  # int32 [in], the group of each input; None: groups of consecutive inputs

    def to(self, device: torch.device) -> "PackedWeight":
        """Return the weight on `device`."""
        zero, group = (None if part is None else part.to(device) for part in (self.zero, self.group))
        return PackedWeight(self.numbers, self.codes.to(device), self.scale.to(device), zero, group)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight [out, in], multiplied in float32 and rounded once."""
        return unpack(self.codes, self.scale, self.zero, self.group, self.numbers, dtype)


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


class PackedLinear(DequantizedLinear):
    """A 4-bit weight as stored in the files of a model, dequantized on use."""

    scale: Tensor
    zero: Tensor | None
    group: Tensor | None

    def __init__(self, packed: PackedWeight, bias: nn.Parameter | None) -> None:
        outputs, half = packed.codes.shape
        super().__init__(torch.empty(outputs, 2 * half, device="meta"), bias)
        self.numbers = packed.numbers
        self.weight = nn.Parameter(packed.codes, requires_grad=False)
        for name in ("scale", "zero", "group"):
            self.register_buffer(name, getattr(packed, name))

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        return unpack(self.weight, self.scale, self.zero, self.group, self.numbers, dtype)


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


def _dequantize(
    codes: Tensor, scale: Tensor, zero: Tensor | None, group: Tensor | None, numbers: str, dtype: torch.dtype
) -> Tensor:
    weight = codes.new_empty((len(codes), 2 * codes.shape[1]), dtype=dtype)
    rows = _rows_of_piece(codes, codes.device.type)
    for start in range(0, len(codes), rows):
        part = slice(start, start + rows)
        weight[part] = _piece(codes[part], scale[part], None if zero is None else zero[part], group, numbers)
    return weight


def _piece(codes: Tensor, scale: Tensor, zero: Tensor | None, group: Tensor | None, numbers: str) -> Tensor:
    """Return some rows in float32."""
    weight = F.embedding(codes.int(), _pairs(numbers, codes.device)).flatten(1)
    if group is not None:
        scale, zero = scale[:, group], None if zero is None else zero[:, group]
    groups = weight.unflatten(1, (scale.shape[1], -1))
    if zero is not None:
        groups.sub_(zero[..., None])
    groups.mul_(scale[..., None].float())
    return weight


def _bytes(codes: Tensor, _scale: Tensor, _zero: Tensor | None, group: Tensor | None, *_others: Any, kind: str) -> int:
    """Return the bytes of a piece in float32 with its codes in int32, or with a scale and a zero point per weight."""
    return _rows_of_piece(codes, kind) * codes.shape[1] * 2 * (6 if group is None else 11)


_OPS = torch.library.Library("app_kernels", "FRAGMENT")
_OPS.define(
    "dequantize_packed(Tensor codes, Tensor scale, Tensor? zero, Tensor? group, str numbers, ScalarType dtype)"
    " -> Tensor"
)
for _device in ("CPU", "CUDA"):
    _OPS.impl("dequantize_packed", _dequantize, _device)
torch.library.register_fake(
    "app_kernels::dequantize_packed",
    lambda codes, _scale, _zero, _group, _numbers, dtype: codes.new_empty(
        (len(codes), 2 * codes.shape[1]), dtype=dtype
    ),
    lib=_OPS,
)
COSTS["app_kernels::dequantize_packed"] = OperationCost(
    cpu_bytes=partial(_bytes, kind="cpu"), gpu_bytes=partial(_bytes, kind="cuda")
)
unpack: Callable[..., Tensor] = torch.ops.app_kernels.dequantize_packed
