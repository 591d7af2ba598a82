"""A gated MLP whose three layers are adapted: down(act(gate(x)) * up(x)).

Kept are x, or what it is made from again, and the outputs of gate and up; what follows from them elementwise is
computed again in the backward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.model.fp8.epilogue import is_silu, opened_and_rounded, read_rounded
from app.model.fp8.layer import Fp8Linear
from app.model.fused.adapted import Adapted, computed_in, gradients, halves_of, products
from app.model.fused.rows import Recipe, kept_rows, recipe_of, rows_again

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """One MLP; `act` works on each number by itself."""

    act: Activation
    gate: Adapted
    up: Adapted
    down: Adapted

    def __call__(self, x: Tensor) -> Tensor:
        """Rows in any leading shape."""
        result: Tensor = _Gated.apply(x, self, recipe_of(x), *halves_of((self.gate, self.up, self.down)))  # type: ignore[no-untyped-call]
        return result

    @property
    def reader(self) -> Fp8Linear | None:
        """What multiplies its inner rows in fp8, where a kernel rounds them as it makes them."""
        layer = self.down.frozen
        return layer if isinstance(layer, Fp8Linear) and is_silu(self.act) else None

    def opened(self, gate: Tensor, up: Tensor) -> Tensor:
        """The inner rows."""
        reader = self.reader
        if reader is not None and read_rounded((reader,), gate):
            return opened_and_rounded(gate, up)
        return self.act(gate).mul_(up)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mlp: GatedMlp, recipe: Recipe | None, *_halves: Tensor) -> Tensor:
        rows = x.flatten(0, -2).to(computed_in(x))
        with torch.autocast(x.device.type, enabled=False):
            (gate, up), inner = products(rows, (mlp.gate, mlp.up))
            (out,), down_inner = products(mlp.opened(gate, up), (mlp.down,))
        ctx.save_for_backward(gate, up, inner, down_inner, *kept_rows(rows, recipe))
        ctx.mlp, ctx.shape, ctx.dtype = mlp, x.shape, x.dtype
        ctx.form = None if recipe is None else recipe.form
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, inner, down_inner, *kept = ctx.saved_tensors
        mlp: GatedMlp = ctx.mlp
        gradient = upstream[0].flatten(0, -2).to(gate.dtype)
        with torch.autocast(gradient.device.type, enabled=False):
            opened, of_gate_by = _opened(mlp.act, gate)
            of_hidden, of_down = gradients((gradient,), opened * up, down_inner, (mlp.down,), of_rows=True)
            assert of_hidden is not None
            of_up = opened * of_hidden
            of_gate = of_gate_by(of_hidden.mul_(up))
            del opened, of_gate_by, of_hidden
            rows = rows_again(kept, ctx.form, gate.dtype)
            of_rows, of_both = gradients(
                (of_gate, of_up), rows, inner, (mlp.gate, mlp.up), of_rows=ctx.needs_input_grad[0]
            )
        of_x = None if of_rows is None else of_rows.to(ctx.dtype).view(ctx.shape)
        return of_x, None, None, *(half for both in (*of_both, *of_down) for half in both)


def _opened(act: Activation, gate: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """act(gate), not to be changed, and from a gradient of it that of gate; any activation that autograd knows."""
    with torch.enable_grad():
        leaf = gate.detach().requires_grad_()
        opened = act(leaf)
    return opened.detach(), lambda gradient: torch.autograd.grad(opened, leaf, gradient)[0]
