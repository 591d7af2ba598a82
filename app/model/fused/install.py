"""Which layers of a network are computed by hand-written passes, and the proof that they compute the same."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from app.model.fused.adapted import Adapted, computed_in, halves_of
from app.model.fused.pieces import Piece, gated_pieces, linear_pieces, norm_pieces, shared_pieces
from app.model.fused.readers import readers_watched
from app.model.fused.shared import Shared
from app.model.fused.unpacking import Present
from app.model.proof import Proof, furthest

_ROWS = 8  # that a proof computes with
_EXACT = 1e-5
_EXACT_NORM = 1e-6
_ROUNDINGS = 8  # of the dtype that is computed in: each side makes a few, and the plain one more

Forward = Callable[..., Any]
Proofs = dict[tuple[Any, ...], Proof]  # by what is alike


@dataclass(frozen=True, slots=True)
class Fused:
    """What was found: how many pieces are fused, and what was compared for each kind of them."""

    linear: int
    gated: int
    shared: int  # groups of layers that are given the same rows
    norms: int
    proofs: tuple[Proof, ...]

    def remarks(self) -> list[str]:
        """On what is computed as the model and PEFT do although it could be fused."""
        return [
            f"adapter.fused=true: {proof.what} differs by {proof.difference:.1e} (allowed {proof.allowed:.1e}), so "
            "these layers are computed as the model and PEFT do"
            for proof in self.proofs
            if not proof.holds
        ]


NOTHING_FUSED = Fused(0, 0, 0, 0, ())


def fuse(
    network: nn.Module,
    arithmetic: Callable[[], Any] | None,
    *,
    shared: bool = True,
    present: Present = nullcontext,
) -> Fused:
    """Put in what gives the modules' own results, and leave alone what does not.

    `arithmetic` is entered for the comparison: autocast of the run's precision. None: nothing is compared, for a
    network that has no numbers. In `present` a module has its weights. Without `shared` no piece hands anything to
    another: every layer computes with its rows alone, and keeps them.
    """
    linear, gated, norms = linear_pieces(network), gated_pieces(network), norm_pieces(network, tells=shared)
    with (arithmetic or nullcontext)(), readers_watched(network, (piece.forward for piece in norms)):
        groups = shared_pieces(network, linear) if shared else []
    proofs = _proofs([*linear, *gated, *norms], arithmetic, present)
    linear, gated, norms = (_sound(pieces, proofs) for pieces in (linear, gated, norms))
    whole = {module for piece in gated for module in piece.modules}
    groups = [piece for piece in groups if piece.parent not in whole]  # it calls none of its layers then
    proofs |= _proofs(groups, arithmetic, present)
    groups = _sound(groups, proofs)
    for piece in (*linear, *gated, *norms):
        (module,) = piece.modules
        module.forward = _in_place_of(module.forward, piece)
    for piece in groups:
        _serve_together(piece)
    return Fused(len(linear), len(gated), len(groups), len(norms), tuple(proofs.values()))


def _proofs(pieces: Iterable[Piece], arithmetic: Callable[[], Any] | None, present: Present) -> Proofs:
    """One for pieces that are alike, each in an arithmetic of its own: autocast remembers weights that it cast."""
    if arithmetic is None:
        return {}
    proofs = {}
    for alike, piece in {each.alike: each for each in pieces}.items():
        with arithmetic(), present(piece.modules[0]):
            proofs[alike] = _proof(piece)
    return proofs


def _sound(pieces: list[Piece], proofs: Proofs) -> list[Piece]:
    """All, where nothing was compared."""
    return [piece for piece in pieces if not proofs or proofs[piece.alike].holds]


def _in_place_of(own: Forward, piece: Piece) -> Forward:
    @wraps(own)
    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not piece.usable():
            return own(x, *args, **kwargs)
        return piece.forward(x)

    return forward


def _serve_together(piece: Piece) -> None:
    shared = Shared(piece.layers)
    piece.parent.forward = shared.parent(piece.parent.forward)
    for place, module in enumerate(piece.modules):
        module.forward = shared.member(place, module.forward, piece.usable)


def _proof(piece: Piece) -> Proof:
    """Outputs and gradients on a few rows, with every B drawn as large as makes the adapter count."""
    x, exact = _rows_for(piece)
    kept = [layer.b.detach().clone() for layer in piece.layers]
    try:
        for layer in piece.layers:
            _draw(layer)
        own, ours = (_outcome(forward, x, piece) for forward in (piece.own, piece.forward))
    finally:
        with torch.no_grad():
            for layer, before in zip(piece.layers, kept, strict=True):
                layer.b.copy_(before)
    allowed = exact if x.dtype == torch.float32 else _ROUNDINGS * torch.finfo(x.dtype).eps
    return Proof(f"{_name(piece)}, against its own forward", furthest(ours, own), allowed)


def _rows_for(piece: Piece) -> tuple[Tensor, float]:
    """In the dtype in which they come, and how exact fp32 must be."""
    like = piece.layers[0].a if piece.layers else piece.modules[0].weight
    width = like.shape[-1]
    places = torch.arange(_ROWS * width, device=like.device, dtype=torch.float32)
    x = torch.sin(places).view(1, _ROWS, width)
    if not piece.layers:
        return x.to(like.dtype), _EXACT_NORM
    return x.to(computed_in(x) if torch.is_autocast_enabled(like.device.type) else like.dtype), _EXACT


def _name(piece: Piece) -> str:
    names = "|".join(type(module).__name__ for module in piece.modules)
    if not piece.layers:
        return f"fused {names} of {piece.modules[0].weight.shape[0]}"
    outputs = "|".join(str(layer.b.shape[0]) for layer in piece.layers)
    sizes = outputs if len(piece.modules) > 1 else str(piece.layers[-1].b.shape[0])
    return f"fused {names}, {piece.layers[0].a.shape[1]} to {sizes}"


@torch.no_grad()
def _draw(layer: Adapted) -> None:
    """Not at random: a run's random numbers must not depend on what was proven."""
    places = torch.arange(layer.b.numel(), device=layer.b.device, dtype=torch.float32)
    layer.b.copy_((torch.cos(places * 1.7) / layer.b.shape[1] ** 0.5).view_as(layer.b))


def _outcome(forward: Forward, x: Tensor, piece: Piece) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    weights = [] if piece.layers else [piece.modules[0].weight]
    trained = [each for each in (*halves_of(piece.layers), *weights) if each.requires_grad]
    with torch.enable_grad():
        given = forward(leaf)
    outs = given if isinstance(given, tuple) else (given,)
    found = torch.autograd.grad([_some_loss(out) for out in outs], [leaf, *trained])
    return [each.detach().double() for each in (*outs, *found)]


def _some_loss(out: Tensor) -> Tensor:
    """Whose gradient does not point along the output: a norm would let almost nothing of that through."""
    places = torch.arange(out.numel(), device=out.device) % 7
    return (out.float() + places.view_as(out)).cos().sum()
