"""A frozen linear layer with its adapter: y = x W^T + bias + scale (x A^T) B^T.

Kept for the backward pass are x, which whoever made it keeps anyway, and the few numbers x A^T. PEFT's forward keeps x
once more for each adapter in the dtype that is computed in, and makes the sum in three passes over y.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.model.fused.frozen import Frozen


@dataclass(frozen=True, slots=True)
class Adapted:
    """One layer; `a` is [r, in], `b` is [out, r]."""

    frozen: Frozen
    a: Tensor
    b: Tensor
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        """Rows in any leading shape."""
        result: Tensor = _Linear.apply(x, self.a, self.b, self.frozen, self.scale)  # type: ignore[no-untyped-call]
        return result


def computed_in(x: Tensor) -> torch.dtype:
    """What autocast would make of it."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def product(rows: Tensor, layer: Adapted) -> tuple[Tensor, Tensor]:
    """Of rows [n, in] in the dtype that is computed in: the layer's output, and rows A^T."""
    inner = rows @ layer.a.to(rows.dtype).T
    out = layer.frozen.product(rows)
    return out.addmm_(inner, layer.b.to(rows.dtype).T, alpha=layer.scale), inner


def gradients(
    gradient: Tensor, rows: Tensor, inner: Tensor, layer: Adapted, *, of_rows: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Of the rows, where somebody waits for it, of A and of B."""
    reached = (gradient @ layer.b.to(gradient.dtype)).mul_(layer.scale)
    of_b = (gradient.T @ inner).mul_(layer.scale).to(layer.b.dtype)
    of_a = (reached.T @ rows).to(layer.a.dtype)
    if not of_rows:
        return None, of_a, of_b
    return layer.frozen.back(gradient).addmm_(reached, layer.a.to(gradient.dtype)), of_a, of_b


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, frozen: Frozen, scale: float) -> Tensor:
        dtype = computed_in(x)
        rows = x.flatten(0, -2).to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            out, inner = product(rows, Adapted(frozen, a, b, scale))
        ctx.save_for_backward(rows, inner, a, b)
        ctx.frozen, ctx.scale, ctx.shape, ctx.dtype = frozen, scale, x.shape, x.dtype
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, inner, a, b = ctx.saved_tensors
        gradient = upstream[0].flatten(0, -2).to(rows.dtype)
        layer = Adapted(ctx.frozen, a, b, ctx.scale)
        with torch.autocast(gradient.device.type, enabled=False):
            of_rows, of_a, of_b = gradients(gradient, rows, inner, layer, of_rows=ctx.needs_input_grad[0])
        of_x = None if of_rows is None else of_rows.to(ctx.dtype).view(ctx.shape)
        return of_x, of_a, of_b, None, None
