"""A gated MLP whose three layers are adapted: down(act(gate(x)) * up(x)).

Kept are x and the outputs of gate and up; what follows from them elementwise is computed again in the backward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.model.fused.adapted import Adapted, computed_in, gradients, product

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
        halves = [half for layer in (self.gate, self.up, self.down) for half in (layer.a, layer.b)]
        result: Tensor = _Gated.apply(x, self, *halves)  # type: ignore[no-untyped-call]
        return result


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mlp: GatedMlp, *_halves: Tensor) -> Tensor:
        rows = x.flatten(0, -2).to(computed_in(x))
        with torch.autocast(x.device.type, enabled=False):
            gate, gate_inner = product(rows, mlp.gate)
            up, up_inner = product(rows, mlp.up)
            out, down_inner = product(mlp.act(gate).mul_(up), mlp.down)
        ctx.save_for_backward(rows, gate, up, gate_inner, up_inner, down_inner)
        ctx.mlp, ctx.shape, ctx.dtype = mlp, x.shape, x.dtype
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, gate, up, gate_inner, up_inner, down_inner = ctx.saved_tensors
        mlp: GatedMlp = ctx.mlp
        gradient = upstream[0].flatten(0, -2).to(rows.dtype)
        wants = ctx.needs_input_grad[0]
        with torch.autocast(gradient.device.type, enabled=False):
            opened, of_gate_by = _opened(mlp.act, gate)
            of_inner, *of_down = gradients(gradient, opened * up, down_inner, mlp.down, of_rows=True)
            assert of_inner is not None
            of_up_rows = opened.mul_(of_inner)
            of_gate_rows = of_gate_by(of_inner.mul_(up))
            x_up, *of_up = gradients(of_up_rows, rows, up_inner, mlp.up, of_rows=wants)
            x_gate, *of_gate = gradients(of_gate_rows, rows, gate_inner, mlp.gate, of_rows=wants)
        of_x = None
        if x_up is not None and x_gate is not None:
            of_x = x_up.add_(x_gate).to(ctx.dtype).view(ctx.shape)
        return of_x, None, *of_gate, *of_up, *of_down


def _opened(act: Activation, gate: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """act(gate), and from a gradient of it that of gate; any activation that autograd knows."""
    with torch.enable_grad():
        leaf = gate.detach().requires_grad_()
        opened = act(leaf)
    return opened.detach().clone(), lambda gradient: torch.autograd.grad(opened, leaf, gradient)[0]
