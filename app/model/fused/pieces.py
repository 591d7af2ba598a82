"""What in a network can be computed by hand-written passes: found by looking at its modules, and on as it computes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from app.model.fp8.epilogue import SwiGlu
from app.model.fused.adapted import Adapted, together
from app.model.fused.frozen import frozen_of
from app.model.fused.gated import GatedMlp
from app.model.fused.norm import RootNorm, eps_of, root_norm_of
from app.model.fused.readers import NormOf
from app.model.fused.shared import same_rows


@dataclass(frozen=True, slots=True)
class Piece:
    """Modules that get another forward; alike are pieces that one proof holds for."""

    modules: tuple[Any, ...]
    forward: Callable[[Tensor], Any]  # the output of the module, or of several those of each
    layers: tuple[Adapted, ...]
    usable: Callable[[], bool]  # whether it may take the place of the modules' own just now
    alike: tuple[Any, ...]
    parent: Any = None  # of several that are given the same rows

    @property
    def own(self) -> Callable[[Tensor], Any]:
        """What it takes the place of."""
        forwards = [module.forward for module in self.modules]
        return forwards[0] if len(forwards) == 1 else lambda x: tuple(each(x) for each in forwards)


def linear_pieces(network: nn.Module) -> list[Piece]:
    """Adapted layers, each by itself."""
    found = ((module, _adapted(module)) for module in network.modules())
    return [
        _piece([module], adapted, [module], [adapted]) for module, adapted in found if adapted is not None
    ]


def gated_pieces(network: nn.Module) -> list[Piece]:
    """Gated MLPs all of whose layers are adapted."""
    pieces = []
    for module in network.modules():
        layers = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        act = getattr(module, "act_fn", None)
        gate, up, down = (_adapted(layer) for layer in layers)
        if act is not None and gate is not None and up is not None and down is not None:
            whole = GatedMlp(act, gate, up, down)
            if whole.reader is not None:
                whole.reader.given_by = SwiGlu()
            pieces.append(_piece([module], whole, layers, [gate, up, down]))
    return pieces


def shared_pieces(network: nn.Module, linear: Sequence[Piece]) -> list[Piece]:
    """Adapted layers that their parent gives the same rows."""
    layer_of = {module: piece.layers[0] for piece in linear for module in piece.modules}
    pieces = []
    for parent, modules in same_rows(network, layer_of, partial(_pass, network)) if linear else []:
        layers = [layer_of[module] for module in modules]
        forward = partial(together, layers=tuple(layers))
        pieces.append(_piece(modules, forward, modules, layers, parent))
    return pieces


def norm_pieces(network: nn.Module, *, tells: bool) -> list[Piece]:
    """Norms of a kind that is known. `tells`: layers that are given their output may make it again."""
    known: dict[tuple[Any, ...], RootNorm | None] = {}
    pieces = []
    for module in network.modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.ndim != 1:
            continue
        alike = (type(module), weight.shape, weight.dtype, weight.requires_grad, eps_of(module))
        if alike not in known:
            known[alike] = root_norm_of(module, tells=tells)
        norm = known[alike]
        if norm is not None:
            pieces.append(Piece((module,), NormOf(module, norm), (), lambda: True, alike))
    return pieces


@torch.no_grad()
def _pass(network: Any) -> None:
    """Two tokens through the backbone, as in evaluation: nothing is drawn at random."""
    mode = network.training
    unwrap = getattr(network, "get_base_model", None)
    lm = network if unwrap is None else unwrap()
    ids = torch.zeros(1, 2, dtype=torch.long, device=lm.get_input_embeddings().weight.device)
    network.eval()
    lm.base_model(input_ids=ids, use_cache=False)
    network.train(mode)


def _piece(
    modules: list[Any], forward: Any, layers: list[Any], adapted: list[Adapted], parent: Any = None
) -> Piece:
    def usable() -> bool:
        """Somebody may have switched adapters off, merged them, or put others in."""
        return all(_is_as_found(layer, each) for layer, each in zip(layers, adapted, strict=True))

    kinds = (_kind(layer, each) for layer, each in zip(layers, adapted, strict=True))
    alike = (len(modules), type(modules[0]), *kinds)
    return Piece(tuple(modules), forward, tuple(adapted), usable, alike, parent)


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
