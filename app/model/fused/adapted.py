"""Frozen linear layers with their adapters: y = x W^T + bias + scale (x A^T) B^T, one or several of the same rows.

Kept for the backward pass are x, or what it is made from again (`rows`), and the few numbers x A^T. PEFT's forward
keeps x once more for each adapter in the dtype that is computed in, and makes the sum in three passes over y. Layers of
the same rows multiply them by all their A at once, and their gradients reach the rows in one buffer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.model.fused.frozen import Frozen, back_onto
from app.model.fused.rows import Recipe, kept_rows, recipe_of, rows_again

Halves = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True, slots=True)
class Adapted:
    """One layer; `a` is [r, in], `b` is [out, r]."""

    frozen: Frozen
    a: Tensor
    b: Tensor
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        """Rows in any leading shape."""
        return together(x, (self,))[0]


def together(x: Tensor, layers: Sequence[Adapted]) -> tuple[Tensor, ...]:
    """The output of each layer, in one node of the graph."""
    result: tuple[Tensor, ...] = _Together.apply(x, layers, recipe_of(x), *halves_of(layers))  # type: ignore[no-untyped-call]
    return result


def halves_of(layers: Iterable[Adapted]) -> list[Tensor]:
    """A, B of each, as an autograd function takes them and returns their gradients."""
    return [half for layer in layers for half in (layer.a, layer.b)]


def computed_in(x: Tensor) -> torch.dtype:
    """What autocast would make of it."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def products(rows: Tensor, layers: Sequence[Adapted]) -> tuple[list[Tensor], Tensor]:
    """Of rows [n, in] in the dtype that is computed in: the layers' outputs, and rows A^T of all, side by side."""
    inner = rows @ _stacked_a(layers, rows.dtype).T
    outs = [
        layer.frozen.product(rows).addmm_(part, layer.b.to(rows.dtype).T, alpha=layer.scale)
        for layer, part in zip(layers, _split(inner, layers, dim=1), strict=True)
    ]
    return outs, inner


def gradients(
    upstream: Sequence[Tensor | None],
    rows: Tensor,
    inner: Tensor,
    layers: Sequence[Adapted],
    *,
    of_rows: bool,
) -> tuple[Tensor | None, list[Halves]]:
    """Of the rows, where somebody waits for it, and of A and B of each layer; None for an output nobody used."""
    reached, of_b = zip(
        *(
            _through_b(gradient, part, layer)
            for gradient, part, layer in zip(upstream, _split(inner, layers, dim=1), layers, strict=True)
        ),
        strict=True,
    )
    of_inner = reached[0] if len(reached) == 1 else torch.cat(reached, dim=1)
    of_a = _split(of_inner.T @ rows, layers, dim=0)
    halves = [
        (None if gradient is None else a.to(layer.a.dtype), b)
        for gradient, a, b, layer in zip(upstream, of_a, of_b, layers, strict=True)
    ]
    total = None
    if of_rows:
        for gradient, layer in zip(upstream, layers, strict=True):
            total = total if gradient is None else back_onto(total, gradient, layer.frozen)
    if total is not None:
        total.addmm_(of_inner, _stacked_a(layers, rows.dtype))
    return total, halves


def _through_b(gradient: Tensor | None, inner: Tensor, layer: Adapted) -> tuple[Tensor, Tensor | None]:
    """What reaches rows A^T, and the gradient of B."""
    if gradient is None:
        return torch.zeros_like(inner), None
    reached = (gradient @ layer.b.to(gradient.dtype)).mul_(layer.scale)
    return reached, (gradient.T @ inner).mul_(layer.scale).to(layer.b.dtype)


def _stacked_a(layers: Sequence[Adapted], dtype: torch.dtype) -> Tensor:
    """Anew for each call: so it is never behind the parameters, and it is small."""
    each = [layer.a.to(dtype) for layer in layers]
    return each[0] if len(each) == 1 else torch.cat(each)


def _split(stacked: Tensor, layers: Sequence[Adapted], dim: int) -> Sequence[Tensor]:
    return torch.split(stacked, [layer.a.shape[0] for layer in layers], dim)


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layers: Sequence[Adapted], recipe: Recipe | None, *halves: Tensor
    ) -> tuple[Tensor, ...]:
        rows = x.flatten(0, -2).to(computed_in(x))
        with torch.autocast(x.device.type, enabled=False):
            outs, inner = products(rows, layers)
        ctx.save_for_backward(inner, *halves, *kept_rows(rows, recipe))
        ctx.set_materialize_grads(False)
        ctx.layers, ctx.shape, ctx.dtype = layers, x.shape, x.dtype
        ctx.computed, ctx.form = rows.dtype, None if recipe is None else recipe.form
        return tuple(out.view(*x.shape[:-1], -1) for out in outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        inner, *rest = ctx.saved_tensors
        halves, kept = rest[: 2 * len(ctx.layers)], rest[2 * len(ctx.layers) :]
        layers = [
            Adapted(layer.frozen, a, b, layer.scale)
            for layer, a, b in zip(ctx.layers, halves[::2], halves[1::2], strict=True)
        ]
        rows = rows_again(kept, ctx.form, ctx.computed)
        given = [None if each is None else each.flatten(0, -2).to(ctx.computed) for each in upstream]
        with torch.autocast(rows.device.type, enabled=False):
            of_rows, of_halves = gradients(given, rows, inner, layers, of_rows=ctx.needs_input_grad[0])
        of_x = None if of_rows is None else of_rows.to(ctx.dtype).view(ctx.shape)
        return of_x, None, None, *(half for both in of_halves for half in both)
