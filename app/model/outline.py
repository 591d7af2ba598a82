"""The network of a run without its weights: the same modules, on meta, of as many layers as are wanted."""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from app.model.adapter import attach
from app.model.build import ModelSections
from app.model.pooled import keep_exact
from app.model.quantize import require_quantizable, settle
from app.model.recompute import repeated_layers
from app.model.tasks import task_of
from app.model.weights import build_on_meta


def base_of(sections: ModelSections, attention: str) -> Any:
    """Of all layers, neither packed nor with an adapter. Outlines that share it leave it as it is."""
    return build_on_meta(sections.model, task_of(sections.task), attention, sections.base_dtype)


class Outline:
    """Made once of its base; gives networks that differ in depth."""

    def __init__(self, sections: ModelSections, base: Any) -> None:
        self.sections = sections
        self._lm = base
        layers = repeated_layers(base)
        self.depth = len(layers)
        self.alike = len({_likeness(layer) for layer in layers}) == 1 and not _names_one(sections)

    def bare(self, depth: int) -> nn.Module:
        """Neither packed nor with an adapter, to be looked at: of all layers it is the base itself."""
        found: nn.Module = self._lm if depth == self.depth else _of_depth(self._lm, depth)
        return found

    def network(self, depth: int) -> nn.Module:
        """Packed and with an adapter, as the sections want it; no layer is recomputed yet."""
        sections = self.sections
        with torch.device("meta"):
            lm = _of_depth(self._lm, depth)
            if sections.packing is not None:
                require_quantizable(sections.model, lm, sections.packing)
                sections.packing.pack(lm.base_model)
                settle(lm, sections.packing)
            task = task_of(sections.task)
            if task.pooled:
                keep_exact(lm)
            return attach(sections.adapter, task, lm, sections.model.path)

    def trained(self, depth: int) -> dict[str, nn.Parameter]:
        """What is trained of a network of so many layers, by name and in its order; of equal layers one is built."""
        few = 1 if self.alike else depth
        network = self.network(few)
        trained = {name: each for name, each in network.named_parameters() if each.requires_grad}
        return _with_more_layers(trained, _name_of_last_layer(network), depth - few)

    @property
    def of_any_recompute(self) -> ModelSections:
        """What it is made of: no layer is recomputed yet, and nothing waits on the host."""
        return replace(self.sections, recompute=False, offload=False)


def _names_one(sections: ModelSections) -> bool:
    """Whether adapters may be in some layers only, which `adapter.targets` gives by their numbers."""
    parts = (part for target in sections.adapter.targets for part in target.split("."))
    return sections.adapter.kind != "none" and any(map(str.isdecimal, parts))


def _likeness(layer: nn.Module) -> tuple[Any, ...]:
    """What makes two layers cost the same: a window may need a mask."""
    weights = tuple((name, tuple(p.shape), p.dtype) for name, p in layer.named_parameters())
    windows = tuple(getattr(part, "sliding_window", None) for part in layer.modules())
    return (*weights, windows)


def _of_depth(lm: Any, depth: int) -> Any:
    """A copy with the first so many of its layers; the others are not copied."""
    held = _layer_lists(lm)
    whole = [(parent, name, layers) for parent, name, layers in held]
    try:
        for parent, name, layers in whole:
            setattr(parent, name, layers[:depth])
        shorter = copy.deepcopy(lm)
    finally:
        for parent, name, layers in whole:
            setattr(parent, name, layers)
    for config in {id(m.config): m.config for m in shorter.modules() if hasattr(m, "config")}.values():
        config.num_hidden_layers = depth
    return shorter


def _name_of_last_layer(network: nn.Module) -> str:
    last = repeated_layers(network)[-1]
    name: str = next(name for name, module in network.named_modules() if module is last)
    return name


def _with_more_layers(trained: dict[str, nn.Parameter], last: str, count: int) -> dict[str, nn.Parameter]:
    """As if so many layers like it came after the `last` one."""
    of_last = [name for name in trained if name.startswith(f"{last}.")]
    if not of_last:
        return trained
    stem, _, at = last.rpartition(".")
    named = list(trained.items())
    end = 1 + list(trained).index(of_last[-1])
    more = {
        f"{stem}.{int(at) + step}{name.removeprefix(last)}": nn.Parameter(torch.empty_like(trained[name]))
        for step in range(1, count + 1)
        for name in of_last
    }
    return {**dict(named[:end]), **more, **dict(named[end:])}


def _layer_lists(lm: nn.Module) -> list[tuple[nn.Module, str, nn.ModuleList]]:
    inside = {id(layer) for layer in repeated_layers(lm)}
    return [
        (parent, name, child)
        for parent in lm.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) and all(id(each) in inside for each in child)
    ]
