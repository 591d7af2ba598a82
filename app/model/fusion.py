"""Installs fused forwards (`model.fused_lora`, `model.rms_norm`) where they give what the layers' own forwards give.

Layers that read the same rows are found by name. A model calls them one after another: the first call computes the
outputs of all, and the others return theirs if they get the very same tensor. The outputs are dropped at the end of
their parent's forward.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from app.model.comparison import Comparison, compare_forwards
from app.model.fused_lora import LoraLayer, gated_mlp, lora_layer_of, together
from app.model.kernels import autocast_dtype
from app.model.quantization import Quantizer
from app.model.rms_norm import RmsNorm, rms_norm_of, version_of

# Children of one module that read the same rows, by the names that transformers gives them
SAME_ROWS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),  # BERT, RoBERTa
    ("q_lin", "k_lin", "v_lin"),  # DistilBERT
    ("q_a_proj", "kv_a_proj_with_mqa"),  # DeepSeek
    ("gate_proj", "up_proj"),
)
_COMPARED_ROWS = 8
_EXACT = 1e-5
_EXACT_NORM = 1e-6

Forward = Callable[..., Any]
Arithmetic = Callable[[], Any] | None


@dataclass(frozen=True, slots=True)
class Fused:
    """Counts of fused parts, and the comparison of each kind of part."""

    linear: int = 0
    gated: int = 0
    shared: int = 0  # groups of layers that read the same rows
    norms: int = 0
    comparisons: tuple[Comparison, ...] = ()

    def remarks(self) -> list[str]:
        """Notes on what could be fused and is computed as the model and PEFT do."""
        return [
            f"adapter.fused=true: {each}, so these layers are computed as the model and PEFT do"
            for each in self.comparisons
            if not each.passed
        ]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Modules that get another forward; one comparison is valid for all pieces with an equal `alike`."""

    modules: tuple[Any, ...]
    forward: Callable[[Tensor], Any]  # the output of the module, or of several those of each
    layers: tuple[LoraLayer, ...]
    alike: tuple[Any, ...]
    parent: Any = None  # of several modules that read the same rows

    def own(self) -> Callable[[Tensor], Any]:
        """The forward that is replaced."""
        forwards = [module.forward for module in self.modules]
        return forwards[0] if len(forwards) == 1 else lambda x: tuple(each(x) for each in forwards)

    def is_usable(self) -> bool:
        return all(layer.is_usable() for layer in self.layers)


def fuse(
    network: nn.Module,
    arithmetic: Arithmetic,
    gathered: Callable[[nn.Module], Any] = nullcontext,
    quantizer: Quantizer | None = None,
) -> Fused:
    """Install every fused forward that gives the modules' own results.

    `arithmetic` is the context of the comparison: autocast in the run's precision. None: nothing is compared, for a
    network on meta. `gathered` is a context in which a module has its weights.
    """
    quantized = {} if quantizer is None else quantizer.fused_forms(network)
    found = {module: lora_layer_of(module, quantized) for module in network.modules()}
    layers = {module: layer for module, layer in found.items() if layer is not None}
    compared: dict[tuple[Any, ...], Comparison] = {}

    def verified(pieces: Iterable[_Piece]) -> list[_Piece]:
        """Pieces that pass their comparison; each one enters autocast anew, because it caches casts."""
        given = list(pieces)
        for alike, piece in {each.alike: each for each in given}.items():
            if arithmetic is not None:
                with gathered(piece.modules[0]), arithmetic():
                    compared[alike] = _compared(piece)
        return [piece for piece in given if arithmetic is None or compared[piece.alike].passed]

    linear = verified(_piece([each], lambda x, layer=each: together(x, (layer,))[0]) for each in layers.values())
    gated, norms = verified(_gated_pieces(network, layers)), verified(_norm_pieces(network))
    whole = {piece.modules[0] for piece in gated}  # a fused MLP calls none of its layers
    sharing = {module: layers[module] for piece in linear for module in piece.modules}
    groups = verified(_groups(network, sharing, whole))
    for piece in (*linear, *gated, *norms):
        (module,) = piece.modules
        module.forward = _in_place_of(module.forward, piece)
    for piece in groups:
        _SharedOutputs(piece)
    return Fused(len(linear), len(gated), len(groups), len(norms), tuple(compared.values()))


def _gated_pieces(network: nn.Module, layers: dict[nn.Module, LoraLayer]) -> Iterator[_Piece]:
    """Gated MLPs with all of their layers adapted."""
    for module in network.modules():
        parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        adapted = [layers[part] for part in parts if part in layers]
        act = getattr(module, "act_fn", None)
        if act is not None and len(adapted) == len(parts):
            gate, up, down = adapted
            yield _piece(adapted, partial(gated_mlp, act=act, gate=gate, up=up, down=down), [module])


def _groups(network: nn.Module, layers: dict[nn.Module, LoraLayer], whole: set[nn.Module]) -> Iterator[_Piece]:
    for parent in network.modules():
        for names in SAME_ROWS if parent not in whole else ():
            group = [layers[child] for name in names if (child := parent._modules.get(name)) in layers]
            if len(group) > 1:
                yield _piece(group, partial(together, layers=group), parent=parent)


def _norm_pieces(network: nn.Module) -> Iterator[_Piece]:
    for module in network.modules():
        weight = module._parameters.get("weight")
        norm = rms_norm_of(module) if weight is not None and weight.ndim == 1 else None
        if weight is not None and norm is not None:
            alike = (type(module), norm, weight.shape, weight.dtype, weight.requires_grad)
            yield _Piece((module,), partial(_normed, norm, module), (), alike)


def _normed(norm: RmsNorm, module: Any, x: Tensor) -> Tensor:
    return norm(x, module.weight)


def _piece(layers: list[LoraLayer], forward: Any, modules: list[Any] | None = None, parent: Any = None) -> _Piece:
    replaced = tuple(modules or [layer.module for layer in layers])
    alike = (len(replaced), type(replaced[0]), *(_kind(layer) for layer in layers))
    return _Piece(replaced, forward, tuple(layers), alike, parent)


def _kind(layer: LoraLayer) -> tuple[Any, ...]:
    base, lora = layer.module.get_base_layer(), layer.lora()
    shapes = (tuple(lora.a.shape), tuple(lora.b.shape))
    return (type(base).__name__, *shapes, base.weight.dtype, base.bias is None, lora.scale)


def _in_place_of(own: Forward, piece: _Piece) -> Forward:
    @wraps(own)
    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not piece.is_usable():
            return own(x, *args, **kwargs)
        return piece.forward(x)

    return forward


class _SharedOutputs:
    """Outputs that the first of several layers computed for the others, during their parent's forward."""

    def __init__(self, piece: _Piece) -> None:
        self._piece = piece
        self._in_parent = False
        self._key: tuple[Any, ...] = ()
        self._outputs: dict[int, Tensor] = {}
        piece.parent.forward = self._parent_forward(piece.parent.forward)
        for place, module in enumerate(piece.modules):
            module.forward = self._layer_forward(place, module.forward)

    def _parent_forward(self, own: Forward) -> Forward:
        @wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._in_parent = True
            try:
                return own(*args, **kwargs)
            finally:
                self._in_parent = False
                self._key, self._outputs = (), {}

        return forward

    def _layer_forward(self, place: int, alone: Forward) -> Forward:
        """The forward of one layer; `alone` is its forward without sharing."""

        @wraps(alone)
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            # a tensor of inference mode has no version counter
            inside = self._in_parent and (torch.compiler.is_compiling() or not x.is_inference())
            if args or kwargs or not inside or not self._piece.is_usable():
                return alone(x, *args, **kwargs)
            given = (version_of(x), torch.is_grad_enabled())
            if not self._outputs:
                self._key, self._outputs = (x, *given), dict(enumerate(self._piece.forward(x)))
            if place not in self._outputs or self._key[0] is not x or self._key[1:] != given:
                return alone(x)
            out = self._outputs.pop(place)
            if not self._outputs:
                self._key = ()
            return out

        return forward


def _compared(piece: _Piece) -> Comparison:
    x, exact = _rows_for(piece)
    loras = [layer.lora() for layer in piece.layers]
    trained = [half for lora in loras for half in (lora.a, lora.b)] or [piece.modules[0].weight]
    names = "|".join(type(module).__name__ for module in piece.modules)
    what = f"fused {names} of {x.shape[-1]} inputs against its own forward"
    return compare_forwards(what, piece.own(), piece.forward, x, trained, [lora.b for lora in loras], exact)


def _rows_for(piece: _Piece) -> tuple[Tensor, float]:
    """Rows in the dtype in which they come, and the tolerance in fp32."""
    like = piece.layers[0].lora().a if piece.layers else piece.modules[0].weight
    width = like.shape[-1]
    places = torch.arange(_COMPARED_ROWS * width, device=like.device, dtype=torch.float32)
    x = torch.sin(places).view(1, _COMPARED_ROWS, width)
    if not piece.layers:
        return x.to(like.dtype), _EXACT_NORM
    return x.to(autocast_dtype(like)), _EXACT
