"""Keep only the inputs of layers, compute the rest again in backward: less memory, a third more arithmetic."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from app.errors import ConfigError
from app.model.offload import Host


def recompute(lm: nn.Module, wanted: bool | int, host: Host | None = None) -> int:
    """All repeated layers of a transformers model, none, or the first so many; returns how many they are.

    The first ones: their inputs wait longest for the backward pass, whichever are chosen, and what the last ones keep
    is let go before the first of them is computed again. `host`: what these keep waits there, but for the last of
    them, whose turn comes first.
    """
    layers = repeated_layers(lm)
    chosen = layers if wanted is True else layers[: int(wanted)]
    for at, layer in enumerate(chosen):
        own = _recomputed(layer.forward)
        layer.forward = own if host is None or at == len(chosen) - 1 else _kept_on_host(own, host, at)
    return len(chosen)


def require_layers(lm: nn.Module, wanted: bool | int) -> None:
    """Refuse more layers than there are; `lm` may be on meta."""
    there = len(repeated_layers(lm))
    if wanted is not True and wanted > there:
        raise ConfigError(
            f"training.recompute={wanted}: this model has {there} layers. "
            f"Give 0 to {there}, true for all of them, or auto."
        )


def repeated_layers(lm: nn.Module) -> list[Any]:
    """From the first to the last."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def again(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return again


def _kept_on_host(forward: Callable[..., Any], host: Host, layer: int) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with host.keeps(layer):
            return forward(*args, **kwargs)

    return run
