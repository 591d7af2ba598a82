"""Random weights drawn layer by layer on a model without memory, so that the whole of it need never exist at once."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


def draw(lm: Any, device: torch.device, seed: int, drawn: Callable[[nn.Module], None]) -> None:
    """Weights on `device` for an `lm` on meta; `drawn` gets each repeated layer as soon as it has its own.

    The numbers depend on kind, sizes and seed alone, not on what `drawn` does, and what the rest of the program draws
    stays what it was.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    inside = {module for layer in layers for module in layer.modules()}
    others = [module for module in lm.modules() if module not in inside]
    on_gpu = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_gpu), torch.no_grad():
        torch.manual_seed(seed)
        for layer in layers:
            _fill(lm, layer.modules(), device)
            drawn(layer)
        _fill(lm, others, device)
        lm.tie_weights()


def _fill(lm: Any, modules: Iterable[nn.Module], device: torch.device) -> None:
    """Memory for what these modules hold themselves, then the model's own initialisation, parents last."""
    children_first = list(modules)[::-1]
    for module in children_first:
        module.to_empty(device=device, recurse=False)
        for tensor in _held_by(module):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
    for module in children_first:
        lm._init_weights(module)
    for module in children_first:
        forgotten = [t for t in _held_by(module) if t.is_floating_point() and bool(t.isnan().any())]
        assert not forgotten, f"{type(module).__name__} does not initialise all that it holds"


def _held_by(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]
