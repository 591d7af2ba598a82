"""Which adapted layers of a network are computed by hand-written passes, and the proof that they compute the same."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from app.model.fused.adapted import Adapted, computed_in
from app.model.fused.frozen import frozen_of
from app.model.fused.gated import GatedMlp
from app.model.proof import Proof

_ROWS = 8  # that a proof computes with
_EXACT = 1e-5
_ROUNDINGS = 8  # of the dtype that is computed in: each side makes a few, and the plain one more

Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Fused:
    """What was found: how many pieces are fused, and what was compared for each kind of them."""

    linear: int
    gated: int
    proofs: tuple[Proof, ...]

    def remarks(self) -> list[str]:
        """On what is computed as PEFT does although it could be fused."""
        return [
            f"adapter.fused=true: {proof.what} differs by {proof.difference:.1e} (allowed {proof.allowed:.1e}), so "
            "these layers are computed as PEFT does"
            for proof in self.proofs
            if not proof.holds
        ]


NOTHING_FUSED = Fused(0, 0, ())


@dataclass(frozen=True, slots=True)
class _Piece:
    """A module that gets another forward; alike are pieces that one proof holds for."""

    module: Any
    forward: Callable[[Tensor], Tensor]
    usable: Callable[[], bool]  # whether it may take the place of the module's own just now
    alike: tuple[Any, ...]
    inputs: int


def fuse(network: nn.Module, arithmetic: Callable[[], Any] | None) -> Fused:
    """Put in what gives the module's own results, and leave alone what does not.

    `arithmetic` is entered for the comparison: autocast of the run's precision. None: nothing is compared, for a
    network that has no numbers.
    """
    pieces = [*_linear_pieces(network), *_gated_pieces(network)]
    proofs = {} if arithmetic is None else _proofs(pieces, arithmetic)
    sound = [piece for piece in pieces if arithmetic is None or proofs[piece.alike].holds]
    for piece in sound:
        piece.module.forward = _in_place_of(piece.module.forward, piece)
    gated = sum(isinstance(piece.forward, GatedMlp) for piece in sound)
    return Fused(len(sound) - gated, gated, tuple(proofs.values()))


def _proofs(pieces: list[_Piece], arithmetic: Callable[[], Any]) -> dict[tuple[Any, ...], Proof]:
    """One for pieces that are alike."""
    with arithmetic():
        return {alike: _proof(piece) for alike, piece in {each.alike: each for each in pieces}.items()}


def _in_place_of(own: Forward, piece: _Piece) -> Forward:
    @wraps(own)
    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not piece.usable():
            return own(x, *args, **kwargs)
        return piece.forward(x)

    return forward


def _linear_pieces(network: nn.Module) -> Iterator[_Piece]:
    for module in network.modules():
        adapted = _adapted(module)
        if adapted is not None:
            yield _piece(module, adapted, [module], [adapted])


def _gated_pieces(network: nn.Module) -> Iterator[_Piece]:
    for module in network.modules():
        layers = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        act = getattr(module, "act_fn", None)
        adapted = [_adapted(layer) for layer in layers]
        gate, up, down = adapted
        if act is not None and gate is not None and up is not None and down is not None:
            yield _piece(module, GatedMlp(act, gate, up, down), layers, [gate, up, down])


def _piece(module: nn.Module, forward: Any, layers: list[Any], adapted: list[Adapted]) -> _Piece:
    def usable() -> bool:
        """Somebody may have switched adapters off, merged them, or put others in."""
        return all(_is_as_found(layer, each) for layer, each in zip(layers, adapted, strict=True))

    alike = (type(module), *(_kind(layer, each) for layer, each in zip(layers, adapted, strict=True)))
    return _Piece(module, forward, usable, alike, adapted[0].a.shape[1])


def _is_as_found(layer: Any, adapted: Adapted) -> bool:
    if layer.disable_adapters or layer.merged:
        return False
    name, *others = layer.active_adapters
    same = layer.lora_A[name].weight is adapted.a and layer.lora_B[name].weight is adapted.b
    return same and layer.scaling[name] == adapted.scale and not others


def _kind(layer: Any, adapted: Adapted) -> tuple[Any, ...]:
    base = layer.get_base_layer()
    sizes = (tuple(adapted.a.shape), tuple(adapted.b.shape))
    return (type(base).__name__, *sizes, base.weight.dtype, base.bias is None, adapted.scale)


def _adapted(module: Any) -> Adapted | None:
    """None for what is no plain LoRA layer with one adapter and without dropout."""
    names = list(getattr(module, "lora_A", ()))
    if len(names) != 1 or not hasattr(module, "get_base_layer"):
        return None
    (name,) = names
    frozen = frozen_of(module.get_base_layer())
    plain = (
        isinstance(module.lora_dropout[name], nn.Identity)
        and name not in module.lora_variant
        and module.lora_A[name].bias is None
        and module.lora_B[name].bias is None
        and list(module.active_adapters) == [name]
    )
    if frozen is None or not plain:
        return None
    return Adapted(
        frozen, module.lora_A[name].weight, module.lora_B[name].weight, float(module.scaling[name])
    )


def _proof(piece: _Piece) -> Proof:
    """Outputs and gradients on a few rows, with every B drawn as large as makes the adapter count."""
    layers = _layers_of(piece.forward)
    like = layers[0].a
    places = torch.arange(_ROWS * piece.inputs, device=like.device, dtype=torch.float32)
    x = torch.sin(places).view(1, _ROWS, piece.inputs)
    x = x.to(computed_in(x) if torch.is_autocast_enabled(like.device.type) else like.dtype)
    kept = [layer.b.detach().clone() for layer in layers]
    try:
        for layer in layers:
            _draw(layer)
        own, ours = (_outcome(forward, x, layers) for forward in (piece.module.forward, piece.forward))
    finally:
        with torch.no_grad():
            for layer, before in zip(layers, kept, strict=True):
                layer.b.copy_(before)
    apart = max(float((a - b).norm() / b.norm()) for a, b in zip(ours, own, strict=True))
    allowed = _EXACT if x.dtype == torch.float32 else _ROUNDINGS * torch.finfo(x.dtype).eps
    size = f"{piece.inputs} to {layers[-1].b.shape[0]}"
    return Proof(f"fused {type(piece.module).__name__}, {size}, against its own forward", apart, allowed)


def _layers_of(forward: Any) -> list[Adapted]:
    return [forward] if isinstance(forward, Adapted) else [forward.gate, forward.up, forward.down]


@torch.no_grad()
def _draw(layer: Adapted) -> None:
    """Not at random: a run's random numbers must not depend on what was proven."""
    places = torch.arange(layer.b.numel(), device=layer.b.device, dtype=torch.float32)
    layer.b.copy_((torch.cos(places * 1.7) / layer.b.shape[1] ** 0.5).view_as(layer.b))


def _outcome(forward: Forward, x: Tensor, layers: list[Adapted]) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    trained = [half for layer in layers for half in (layer.a, layer.b)]
    with torch.enable_grad():
        out = forward(leaf)
    found = torch.autograd.grad(out.float().cos().sum(), [leaf, *trained])
    return [each.detach().double() for each in (out, *found)]
