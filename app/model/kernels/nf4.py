"""Weights of four bits, as bitsandbytes stores them, unpacked into room that stays: to the last bit what it unpacks."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

_OPS = torch.library.Library("app_kernels", "FRAGMENT")
_OPS.define(
    "unpack_nf4(Tensor data, Tensor code, Tensor scales, Tensor? second, Tensor? second_code, Tensor? offset, "
    "int block, int second_block, Tensor(a!) out) -> ()"
)


@dataclass(frozen=True, slots=True)
class Packed:
    """What bitsandbytes keeps of a weight. Its scales are fp32, or bytes that have scales in turn."""

    data: Tensor  # two weights a byte, the first of them above
    code: Tensor  # [16]
    scales: Tensor  # of each block of weights
    second: Tensor | None  # of each block of scales
    second_code: Tensor | None  # [256]
    offset: Tensor | None  # that all scales are nearer to zero by
    block: int
    second_block: int

    @classmethod
    def of(cls, weight: Any) -> Self:
        """A parameter of bitsandbytes."""
        state = weight.quant_state
        second = state.state2
        return cls(
            data=weight.data.view(torch.uint8),
            code=state.code,
            scales=state.absmax,
            second=None if second is None else second.absmax,
            second_code=None if second is None else second.code,
            offset=state.offset,
            block=state.blocksize,
            second_block=1 if second is None else second.blocksize,
        )

    def into(self, out: Tensor) -> None:
        """Unpack into `out`, contiguous and as large as the weight, in one launch."""
        torch.ops.app_kernels.unpack_nf4(
            self.data,
            self.code,
            self.scales,
            self.second,
            self.second_code,
            self.offset,
            self.block,
            self.second_block,
            out,
        )


def unpack_plain(packed: Packed, out: Tensor) -> None:
    """What the kernel computes: one rounding for each product and sum in fp32, one to what `out` is."""
    scales = packed.scales
    if packed.second is not None and packed.second_code is not None and packed.offset is not None:
        of_scales = packed.second.repeat_interleave(packed.second_block)[: len(scales)]
        scales = packed.second_code[scales.int()] * of_scales + packed.offset
    data = packed.data.flatten()
    halves = torch.stack([data >> 4, data & 15], dim=1).flatten()[: out.numel()]
    out.view(-1).copy_(packed.code[halves.int()] * scales.repeat_interleave(packed.block)[: out.numel()])


def _on_cpu(*given: Any) -> None:
    unpack_plain(Packed(*given[:-1]), given[-1])


def _on_cuda(*given: Any) -> None:
    from app.model.kernels.nf4_triton import unpack

    unpack(Packed(*given[:-1]), given[-1])


_OPS.impl("unpack_nf4", _on_cpu, "CPU")
_OPS.impl("unpack_nf4", _on_cuda, "CUDA")
torch.library.register_fake("app_kernels::unpack_nf4", lambda *_given: None, lib=_OPS)


class Scratch:
    """Room for one unpacked weight, as large as the largest: what is in it holds until the next is unpacked.

    Whoever multiplies by it must not keep it for a backward pass.
    """

    def __init__(self, weights: Iterable[Any]) -> None:
        self._largest = max(weight.quant_state.shape.numel() for weight in weights)
        self._rooms: dict[torch.dtype, Tensor] = {}

    def unpacked(self, weight: Any, dtype: torch.dtype) -> Tensor:
        """[out, in], until the next."""
        shape = weight.quant_state.shape
        room = self._rooms.get(dtype)
        if room is None:
            room = self._rooms[dtype] = torch.empty(self._largest, dtype=dtype, device=weight.device)
        out = room[: shape.numel()].view(shape)
        Packed.of(weight).into(out)
        return out
