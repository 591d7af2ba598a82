"""Products with a frozen weight and with its transpose, for each way in which it is stored."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Frozen(Protocol):
    """A linear layer that is not trained. Rows come in the dtype that is computed in."""

    def product(self, rows: Tensor) -> Tensor:
        """rows W^T + bias."""

    def back(self, gradient: Tensor) -> Tensor:
        """gradient W: what reaches the rows."""


@dataclass(frozen=True, slots=True)
class Dense:
    """As it is."""

    layer: nn.Linear

    def product(self, rows: Tensor) -> Tensor:
        """One GEMM."""
        bias = self.layer.bias
        return F.linear(rows, self.layer.weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype))

    def back(self, gradient: Tensor) -> Tensor:
        """One GEMM."""
        return gradient @ self.layer.weight.to(gradient.dtype)


@dataclass(frozen=True, slots=True)
class FourBits:
    """Packed by bitsandbytes, and unpacked for each product: into room that all share where they were given it."""

    layer: Any

    def product(self, rows: Tensor) -> Tensor:
        """As the layer itself computes it."""
        weight = self._unpacked(rows)
        if weight is None:
            result: Tensor = self.layer(rows)
            return result
        bias = self.layer.bias
        return F.linear(rows, weight, None if bias is None else bias.to(rows.dtype))

    def back(self, gradient: Tensor) -> Tensor:
        """As bitsandbytes does in its own backward pass."""
        from bitsandbytes.functional import dequantize_4bit

        weight = self._unpacked(gradient)
        if weight is None:
            packed = self.layer.weight
            weight = dequantize_4bit(packed.data, packed.quant_state).to(gradient.dtype)
        return gradient @ weight

    def _unpacked(self, rows: Tensor) -> Tensor | None:
        """Where nobody keeps it: what is kept for a backward pass would be written over by then."""
        scratch = getattr(self.layer, "scratch", None)
        kept = torch.is_grad_enabled() and rows.requires_grad
        if scratch is None or kept or torch.compiler.is_compiling():
            return None
        result: Tensor = scratch.unpacked(self.layer.weight, rows.dtype)
        return result


def _itself(layer: Any) -> Frozen:
    """A layer that has both products."""
    found: Frozen = layer
    return found


def back_onto(total: Tensor | None, gradient: Tensor, frozen: Frozen) -> Tensor:
    """gradient W added to what already reached the same rows, in its place; None: nothing did."""
    if total is None:
        return frozen.back(gradient)
    if isinstance(frozen, Dense):  # in the product itself, without a buffer of its own
        return total.addmm_(gradient, frozen.layer.weight.to(gradient.dtype))
    return total.add_(frozen.back(gradient))


FROZEN: dict[str, Callable[[Any], Frozen]] = {"Linear": Dense, "Linear4bit": FourBits, "Fp8Linear": _itself}


def frozen_of(layer: nn.Module) -> Frozen | None:
    """None for a kind of layer that is computed in no way known here, or is trained."""
    known = FROZEN.get(type(layer).__name__)
    trained = any(parameter.requires_grad for parameter in layer.parameters())
    return None if known is None or trained else known(layer)
