"""The network of a run on the meta device, truncated to a number of layers."""

import copy
from typing import Any

import torch
from torch import nn

from app.adapters.adapters import add_adapter
from app.base.structure import open_base
from app.config.tasks import task_of
from app.layers.activation_checkpointing import repeated_layers
from app.layers.head import keep_head_in_fp32
from app.model.build import ModelSections


class MetaModel:
    """Builds copies of a network with fewer layers."""

    def __init__(self, sections: ModelSections, attention: str) -> None:
        """`attention`: name of an implementation registered in transformers."""
        self.sections = sections
        self._lm = open_base(sections.model, sections.task).on_meta(attention, sections.base_dtype)
        layers = repeated_layers(self._lm)
        self.depth = len(layers)
        keys = [cost_key(layer) for layer in layers]
        adapter = sections.adapter
        names = (*adapter.targets, *adapter.rank_pattern, *adapter.alpha_pattern, *adapter.train_whole)
        numbered = any(part.isdecimal() for name in names for part in name.split("."))
        targets_single_layers = adapter.kind != "none" and (numbered or bool(adapter.layers))
        # layers after which the same ones come again: all of them where there is no such pattern
        self.period = next(each for each in range(1, len(keys) + 1) if keys[each:] == keys[:-each])
        if targets_single_layers:
            self.period = self.depth

    def network(self, depth: int) -> nn.Module:
        """Network of so many layers, quantised and with its adapter; no layer is recomputed yet."""
        sections = self.sections
        with torch.device("meta"):
            lm = _truncated(self._lm, depth)
            if sections.quantizer is not None:
                sections.quantizer.require_quantizable(sections.model, lm)
                sections.quantizer.quantize(lm)
            task = task_of(sections.task)
            if task.has_classes:
                keep_head_in_fp32(lm)
            return add_adapter(sections.adapter, task, lm, sections.model.path)

    @property
    def has_equal_layers(self) -> bool:
        return self.period == 1


def cost_key(layer: nn.Module) -> tuple[Any, ...]:
    """Weights and sliding windows of a layer: layers with equal keys cost the same. A window may need a mask."""
    weights = tuple((name, tuple(p.shape), p.dtype) for name, p in layer.named_parameters())
    windows = tuple(getattr(part, "sliding_window", None) for part in layer.modules())
    return (*weights, windows)


def _truncated(lm: Any, depth: int) -> Any:
    """Copy a model with its first `depth` layers only."""
    repeated = {id(layer) for layer in repeated_layers(lm)}
    lists = [
        (parent, name, child)
        for parent in lm.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) and all(id(each) in repeated for each in child)
    ]
    try:
        for parent, name, layers in lists:
            setattr(parent, name, layers[:depth])
        shorter = copy.deepcopy(lm)
    finally:
        for parent, name, layers in lists:
            setattr(parent, name, layers)
    for config in {id(m.config): m.config for m in shorter.modules() if hasattr(m, "config")}.values():
        config.num_hidden_layers = depth
    return shorter
