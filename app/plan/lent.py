"""Weights that one of several processes keeps and the others borrow (`parallel=zero3`), in a trace of one of them.

Where depth is extrapolated a trace keeps none of them: layers come as a whole. What a process keeps of them is counted
by their names, and what it keeps of the layers that are there need not come.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from app.engine.counting import rounded
from app.engine.reduction import bytes_of
from app.model.dealing import owners_of
from app.model.lending import Lending, Wire
from app.model.recompute import repeated_layers
from app.plan.stages import (
    BOTTOM,
    EVALUATION,
    FORWARD,
    HEAD,
    HEAD_BACKWARD,
    LOWEST_KEPT,
    SECOND,
    TOP,
    TOP_AGAIN,
)

_LAYER = re.compile(r"\.(\d+)\.")
_OF_AN_ADAPTER = "base_model.model."  # goes before the names of what PEFT has wrapped
_NOBODY = -1  # a process that keeps nothing

Sizes = Mapping[str, Mapping[str, int]]  # bytes by kind, of each module by its name, of whichever layer


@dataclass(frozen=True, slots=True)
class Kept:
    """Of one process: bytes by kind, and of each layer."""

    kinds: Mapping[str, int]
    layers: Sequence[int]

    def of_phases(self, recomputed: int) -> dict[str, int]:
        """What need not come, at least: of the layers that are there while a phase needs most."""
        top, again = len(self.layers) - 1, recomputed - 1
        going_back = {TOP: top, LOWEST_KEPT: recomputed, TOP_AGAIN: again, SECOND: 1, BOTTOM: 0}
        found = {phase: min(self._two(at), self._two(at - 1)) for phase, at in going_back.items()}
        going_up = [*(self._two(at) for at in range(1, top + 1)), self.layers[top]]
        found |= dict.fromkeys((FORWARD, EVALUATION), min(going_up))
        return found | dict.fromkeys((HEAD, HEAD_BACKWARD), self.layers[top])

    def _two(self, at: int) -> int:
        """Of a layer and the one below."""
        return sum(self.layers[max(at - 1, 0) : max(at + 1, 1)])


class Owners:
    """Of the weights of a whole model, whose tensors need no memory; known by module, as without an adapter."""

    def __init__(self, bare: nn.Module, processes: int, *, trained: bool) -> None:
        self._of = owners_of(bare, processes, trained=trained)
        self._sizes = {
            name: sum(map(bytes_of, bare.get_submodule(name).parameters(recurse=False))) for name in self._of
        }
        self._depth = len(repeated_layers(bare))

    def of_trained(self, trained: Mapping[str, nn.Parameter]) -> dict[nn.Parameter, int]:
        """Whose they are already."""
        named = ((_module(name), each) for name, each in trained.items())
        return {each: self._of[name] for name, each in named if name in self._of}

    def loads(self, processes: int) -> list[int]:
        """What each process keeps of layers, as they are before they are packed."""
        loads = [0] * processes
        for name in self._of:
            if _LAYER.search(f"{name}."):
                loads[self._of[name]] += self._sizes[name]
        return loads

    def kept(self, rank: int, sizes: Sizes) -> Kept:
        """By one process, if the modules of a layer have `sizes`."""
        kinds: Counter[str] = Counter()
        layers = [0] * self._depth
        for name, owner in self._of.items():
            place = _LAYER.search(f"{name}.")
            found = sizes.get(any_layer(f"{name}."), {})
            if owner == rank and place is not None and found:
                kinds.update(found)
                layers[int(place[1])] += sum(found.values())
        return Kept(kinds, layers)


def lend(
    network: nn.Module, bare: nn.Module, wire: Wire, part: tuple[int, int] | None, *, trained: bool
) -> Lending:
    """Layers of `network` whose weights come as they are needed. `bare` is the same on meta, without an adapter;
    `part`: rank and number of processes, None for one that keeps nothing.
    """
    rank, processes = part or (_NOBODY, 1)
    lending = Lending(wire, rank, processes, trained=trained)
    lending.deal(bare)
    lm = _plain(network)
    for name, module in lm.named_modules():
        lending.take(_without_adapter(name), module)
    lending.serve_layers(repeated_layers(lm))
    return lending


def sizes_of(lending: Lending, kept: Mapping[str, Sequence[Tensor]]) -> Sizes:
    """Of what is lent, its kind by that of `kept`."""
    kinds = {each.untyped_storage()._cdata: kind for kind, tensors in kept.items() for each in tensors}
    sizes: dict[str, Counter[str]] = {}
    for each in lending.lent:
        kind = kinds[each.tensor.untyped_storage()._cdata]
        sizes.setdefault(f"{each.name}.", Counter())[kind] += rounded(each.size)
    return {any_layer(name): found for name, found in sizes.items()}


def any_layer(name: str) -> str:
    """The same for each layer."""
    return _LAYER.sub(".N.", name)


def _plain(network: Any) -> Any:
    return network.get_base_model() if hasattr(network, "get_base_model") else network


def _module(name: str) -> str:
    return _without_adapter(name.rpartition(".")[0].removeprefix(_OF_AN_ADAPTER))


def _without_adapter(name: str) -> str:
    return name.replace(".base_layer", "")
