"""The network of a run without its weights: the same modules, on meta, of as many layers as are wanted."""

import copy
from typing import Any

import torch
from torch import nn

from app.model.activation_checkpointing import repeated_layers
from app.model.build import ModelSections
from app.model.head import keep_head_in_fp32
from app.model.load_base import build_on_meta
from app.model.lora import add_adapter
from app.model.quantization import require_quantizable
from app.model.tasks import task_of


class Outline:
    """Gives networks that differ in depth."""

    def __init__(self, sections: ModelSections, attention: str) -> None:
        """`attention`: a name that transformers knows."""
        self._sections = sections
        self._lm = build_on_meta(sections.model, task_of(sections.task), attention, sections.base_dtype)
        layers = repeated_layers(self._lm)
        self.depth = len(layers)
        self.alike = len({_likeness(layer) for layer in layers}) == 1 and not _names_one(sections)

    def network(self, depth: int) -> nn.Module:
        """Packed and with an adapter, as the sections want it; no layer is recomputed yet."""
        sections = self._sections
        with torch.device("meta"):
            lm = _of_depth(self._lm, depth)
            if sections.quantizer is not None:
                require_quantizable(sections.model, lm, sections.quantizer)
                sections.quantizer.quantize(lm.base_model)
                sections.quantizer.finish(lm)
            task = task_of(sections.task)
            if task.pooled:
                keep_head_in_fp32(lm)
            return add_adapter(sections.adapter, task, lm, sections.model.path)


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
    whole = _layer_lists(lm)
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


def _layer_lists(lm: nn.Module) -> list[tuple[nn.Module, str, nn.ModuleList]]:
    inside = {id(layer) for layer in repeated_layers(lm)}
    return [
        (parent, name, child)
        for parent in lm.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) and all(id(each) in inside for each in child)
    ]
