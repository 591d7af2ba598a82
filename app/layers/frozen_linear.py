"""Frozen linear layers that multiply in a way of their own: what they share, and the base in int8."""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from app.layers.kernels import autocast_dtype
from app.layers.operations import COSTS, OperationCost
from app.layers.partition import DEQUANTIZE

_INT8_MAX = 127


class FrozenLinear(nn.Linear, ABC):
    """A linear layer of which only the rows get a gradient. Rows of `product` and `back` are in the dtype of the
    arithmetic.
    """

    def __init__(self, weight: Tensor, bias: nn.Parameter | None) -> None:
        """Keep the bias and the sizes of `weight` [out, in]; a kind stores the weight."""
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.register_parameter("bias", bias)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Linear.apply(x, self)  # type: ignore[no-untyped-call]
        return result

    @abstractmethod
    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in] that the layer multiplies by."""

    @abstractmethod
    def product(self, rows: Tensor) -> Tensor:
        """The output for rows [n, in]."""

    @abstractmethod
    def back(self, gradient: Tensor) -> Tensor:
        """The gradient of the rows from that of the output."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FrozenLinear) -> Tensor:
        dtype = autocast_dtype(x)
        ctx.layer, ctx.shape, ctx.dtype, ctx.computed = layer, x.shape, x.dtype, dtype
        with torch.autocast(x.device.type, enabled=False):
            return layer.product(x.flatten(0, -2).to(dtype)).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        gradient = upstream[0].flatten(0, -2).to(ctx.computed)
        with torch.autocast(gradient.device.type, enabled=False):
            return ctx.layer.back(gradient).to(ctx.dtype).view(ctx.shape), None


class Int8Linear(FrozenLinear):
    """A weight as bitsandbytes stores it for LLM.int8: integers, and a scale per output. Rows are not rounded, so there
    are no outliers to hold apart, for which LLM.int8 has the host wait in each layer.
    """

    scale: Tensor

    def __init__(self, weight: Tensor, bias: nn.Parameter | None) -> None:
        from bitsandbytes.functional import int8_vectorwise_quant

        super().__init__(weight, bias)
        integers, largest, _ = int8_vectorwise_quant(weight.to(torch.float16).contiguous())
        self.weight = nn.Parameter(integers, requires_grad=False)
        # a GPU would divide by multiplying with the reciprocal, a CPU not: this is the same number on both
        self.register_buffer("scale", largest[:, None] * (1 / _INT8_MAX))

    def product(self, rows: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(rows.dtype)
        return F.linear(rows, self.unpacked(rows.dtype), bias)

    def back(self, gradient: Tensor) -> Tensor:
        return gradient @ self.unpacked(gradient.dtype)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        weight: Tensor = torch.ops.app_kernels.dequantize_int8(self.weight, self.scale, dtype)
        return weight


def _dequantize(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype).mul_(scale.to(dtype))


# One operation, so that compiled layers never save a dequantized weight for their backward pass
_OPS = torch.library.Library("app_kernels", "FRAGMENT")
_OPS.define("dequantize_int8(Tensor weight, Tensor scale, ScalarType dtype) -> Tensor")
for _device in ("CPU", "CUDA"):
    _OPS.impl("dequantize_int8", _dequantize, _device)
torch.library.register_fake(
    "app_kernels::dequantize_int8", lambda weight, _scale, dtype: torch.empty_like(weight, dtype=dtype), lib=_OPS
)
COSTS[DEQUANTIZE] = OperationCost()
