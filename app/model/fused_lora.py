"""Frozen linear layers with LoRA, their gradients written by hand: PEFT's numbers, less memory, fewer passes.

y = x W^T + bias + scale (x A^T) B^T, for one layer, for several that read the same rows, or for a whole gated MLP.
Saved for the backward pass are x, or what it is recomputed from, and the small x A^T. PEFT's forward saves x once more
for each adapter in autocast's dtype, and makes the sum in three passes over y. Layers of the same rows multiply them by
all their A at once, and their gradients are added into one buffer.

Modules are stored, never parameters: FSDP replaces those.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from app.model.kernels import autocast_dtype, on_gpu, product_in_float32
from app.model.rms_norm import Recompute, recompute_of, with_recompute

Halves = tuple[Tensor | None, Tensor | None]


class Frozen(Protocol):
    """A linear layer that is not trained; rows are in the dtype of the arithmetic."""

    def prepared(self, rows: Tensor) -> Any:
        """What `product` takes of rows: one for all layers of a kind that read them."""

    def product(self, prepared: Any) -> Tensor:
        """rows W^T + bias."""

    def back(self, gradient: Tensor) -> Tensor:
        """gradient W: the gradient of the rows."""


@dataclass(frozen=True, slots=True)
class _Dense:
    layer: nn.Linear

    def prepared(self, rows: Tensor) -> Tensor:
        return rows

    def product(self, rows: Tensor) -> Tensor:
        bias = None if self.layer.bias is None else self.layer.bias.to(rows.dtype)
        return F.linear(rows, self.layer.weight.to(rows.dtype), bias)

    def back(self, gradient: Tensor) -> Tensor:
        return gradient @ self.layer.weight.to(gradient.dtype)


class Lora(NamedTuple):
    """Tensors of one layer for a pass: `a` is [r, in], `b` is [out, r]."""

    frozen: Frozen
    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class LoraLayer:
    """A LoRA layer of PEFT and the name of its adapter."""

    module: Any
    adapter: str
    frozen: Frozen

    def lora(self) -> Lora:
        a, b = (half[self.adapter].weight for half in (self.module.lora_A, self.module.lora_B))
        return Lora(self.frozen, a, b, float(self.module.scaling[self.adapter]))

    def is_usable(self) -> bool:
        """False where adapters were disabled, merged or replaced."""
        module = self.module
        return not (module.disable_adapters or module.merged) and list(module.active_adapters) == [self.adapter]


def lora_layer_of(module: Any, quantized: Mapping[nn.Module, Frozen]) -> LoraLayer | None:
    """The layer, if it is a plain LoRA layer with one adapter and without dropout, on a frozen one of a known kind."""
    names = list(getattr(module, "lora_A", ()))
    if len(names) != 1 or not hasattr(module, "get_base_layer"):
        return None
    (name,) = names
    base = module.get_base_layer()
    frozen = _Dense(base) if type(base) is nn.Linear else quantized.get(base)
    plain = (
        not any(parameter.requires_grad for parameter in base.parameters())
        and isinstance(module.lora_dropout[name], nn.Identity)
        and name not in module.lora_variant
        and module.lora_A[name].bias is None
        and module.lora_B[name].bias is None
        and list(module.active_adapters) == [name]
    )
    return LoraLayer(module, name, frozen) if frozen is not None and plain else None


def together(x: Tensor, layers: Sequence[LoraLayer]) -> tuple[Tensor, ...]:
    """The outputs of layers that read the same rows, in one node of the autograd graph."""
    loras = [layer.lora() for layer in layers]
    halves = [half for lora in loras for half in (lora.a, lora.b)]
    result: tuple[Tensor, ...] = _Together.apply(x, loras, recompute_of(x), *halves)  # type: ignore[no-untyped-call]
    return result


def gated_mlp(x: Tensor, act: Callable[[Tensor], Tensor], gate: LoraLayer, up: LoraLayer, down: LoraLayer) -> Tensor:
    """down(act(gate(x)) * up(x)), with an elementwise `act`. Only the outputs of gate and up are saved."""
    gated, scaled = together(x, (gate, up))
    # a compiler derives the gate itself, and computes it anew where that saves memory
    rows: Tensor = act(gated) * scaled if torch.compiler.is_compiling() else _Gate.apply(gated, scaled, act)  # type: ignore[no-untyped-call]
    with_recompute(rows, lambda one, other: act(one).mul_(other), gated, scaled)
    return together(rows, (down,))[0]


def products(rows: Tensor, loras: Sequence[Lora]) -> tuple[list[Tensor], Tensor]:
    """The layers' outputs for rows [n, in], and rows A^T of all layers, concatenated."""
    inner = rows @ _stacked_a(loras, rows.dtype).T
    frozen = {type(lora.frozen): lora.frozen for lora in loras}
    prepared = {kind: each.prepared(rows) for kind, each in frozen.items()}
    outs = [
        _add_product(lora.frozen.product(prepared[type(lora.frozen)]), part, lora.b.to(rows.dtype).T, lora.scale)
        for lora, part in zip(loras, _split(inner, loras, dim=1), strict=True)
    ]
    return outs, inner


def gradients(
    upstream: Sequence[Tensor | None], rows: Tensor, inner: Tensor, loras: Sequence[Lora], *, of_rows: bool
) -> tuple[Tensor | None, list[Halves]]:
    """Gradients of the rows, where needed, and of A and B of each layer; None for an output that was not used."""
    parts = zip(upstream, _split(inner, loras, dim=1), loras, strict=True)
    reached, of_b = zip(*(_through_b(*part) for part in parts), strict=True)
    of_inner = reached[0] if len(reached) == 1 else torch.cat(reached, dim=1)
    of_a = _split(_summed(of_inner.T, rows), loras, dim=0)
    halves = [
        (None if gradient is None else a.to(lora.a.dtype), b)
        for gradient, a, b, lora in zip(upstream, of_a, of_b, loras, strict=True)
    ]
    total = None
    if of_rows:
        for gradient, lora in zip(upstream, loras, strict=True):
            total = total if gradient is None else _back_onto(total, gradient, lora.frozen)
    if total is not None:
        total = _add_product(total, of_inner, _stacked_a(loras, rows.dtype))
    return total, halves


def _add_product(total: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """total + scale left right, in place. While compiling as a sum, which fuses with what reads it: inductor would copy
    `total` first.
    """
    if torch.compiler.is_compiling():
        return total + scale * (left @ right)
    return total.addmm_(left, right, alpha=scale)


def _through_b(gradient: Tensor | None, inner: Tensor, lora: Lora) -> tuple[Tensor, Tensor | None]:
    """The gradients of rows A^T and of B."""
    if gradient is None:
        return torch.zeros_like(inner), None
    reached = (gradient @ lora.b.to(gradient.dtype)).mul_(lora.scale)
    return reached, _summed(gradient.T, inner).mul_(lora.scale).to(lora.b.dtype)


def _summed(left: Tensor, right: Tensor) -> Tensor:
    """left right, a sum over rows; of 16-bit numbers in float32 on a GPU. A CPU has no such kernel."""
    return product_in_float32(left, right) if left.itemsize == 2 and on_gpu(left.device) else left @ right


def _back_onto(total: Tensor | None, gradient: Tensor, frozen: Frozen) -> Tensor:
    """Add gradient W to `total` in place; None: there is no gradient of these rows yet."""
    if total is None:
        return frozen.back(gradient)
    if isinstance(frozen, _Dense):  # in the product itself, without another buffer
        return _add_product(total, gradient, frozen.layer.weight.to(gradient.dtype))
    return total.add_(frozen.back(gradient))


def _stacked_a(loras: Sequence[Lora], dtype: torch.dtype) -> Tensor:
    """All A, concatenated for each call: never out of date, and small."""
    each = [lora.a.to(dtype) for lora in loras]
    return each[0] if len(each) == 1 else torch.cat(each)


def _split(stacked: Tensor, loras: Sequence[Lora], dim: int) -> Sequence[Tensor]:
    return torch.split(stacked, [lora.a.shape[0] for lora in loras], dim)


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, loras: Sequence[Lora], recompute: Recompute | None, *halves: Tensor
    ) -> tuple[Tensor, ...]:
        rows = x.flatten(0, -2).to(autocast_dtype(x))
        with torch.autocast(x.device.type, enabled=False):
            outs, inner = products(rows, loras)
        ctx.save_for_backward(inner, *halves, *((rows,) if recompute is None else recompute.tensors))
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.dtype, ctx.computed = x.shape, x.dtype, rows.dtype
        ctx.recompute = None if recompute is None else recompute.function
        ctx.frozen = [(lora.frozen, lora.scale) for lora in loras]
        # no views, which autograd would not let a model change in place
        return tuple(torch.ops.aten._unsafe_view(out, [*x.shape[:-1], out.shape[-1]]) for out in outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        inner, *rest = ctx.saved_tensors
        halves, kept = rest[: 2 * len(ctx.frozen)], rest[2 * len(ctx.frozen) :]
        loras = [
            Lora(frozen, a, b, scale)
            for (frozen, scale), a, b in zip(ctx.frozen, halves[::2], halves[1::2], strict=True)
        ]
        rows = kept[0] if ctx.recompute is None else ctx.recompute(*kept).flatten(0, -2).to(ctx.computed)
        given = [None if each is None else each.flatten(0, -2).to(ctx.computed) for each in upstream]
        with torch.autocast(rows.device.type, enabled=False):
            of_rows, of_halves = gradients(given, rows, inner, loras, of_rows=ctx.needs_input_grad[0])
        of_x = None if of_rows is None else of_rows.to(ctx.dtype).view(ctx.shape)
        return of_x, None, None, *(half for both in of_halves for half in both)


class _Gate(torch.autograd.Function):
    """act(gate) * up for any activation that autograd knows; act(gate) is recomputed in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        with torch.autocast(gate.device.type, enabled=False):
            return act(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gate, up), (gradient,) = ctx.saved_tensors, upstream
        with torch.autocast(gate.device.type, enabled=False):
            with torch.enable_grad():
                leaf = gate.detach().requires_grad_()
                activated = ctx.act(leaf)
            (of_gate,) = torch.autograd.grad(activated, leaf, gradient * up)
            return of_gate, activated.detach().mul_(gradient), None
