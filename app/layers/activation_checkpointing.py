"""Gradient checkpointing: layers save only their inputs and are recomputed in the backward pass.

With offloading, these inputs are stored in host memory and copied back one at a time, when their layer is recomputed.
On a CPU the same copies are made within the same memory.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from app.errors import ConfigError

_RANDOM = ("drop", "noise", "jitter")  # in names of config.json
_IS_RECOMPUTED = "is_recomputed"  # attribute of a recomputed forward


class HostOffload:
    """Host copies of the inputs of recomputed layers. A memory plan sets another `device`, which has no memory.

    `torch.autograd.graph.save_on_cpu` would also copy tensors that all layers share, once per layer.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self.bytes = 0  # of the last pass

    def offload(self, layer: int) -> AbstractContextManager[Any]:
        """Return the context for a call of a recomputed layer; the lowest one is number 0."""
        if layer == 0:
            self.bytes = 0
        has_input = False

        def pack(tensor: Tensor) -> tuple[Tensor, torch.device | None]:
            nonlocal has_input
            if has_input or tensor.ndim < 3 or not tensor.is_floating_point():
                return tensor, None  # the input of a layer is its first tensor of hidden states
            has_input = True
            self.bytes += tensor.nbytes
            return _copied(tensor, self._device, pin_memory=tensor.is_cuda), tensor.device

        return torch.autograd.graph.saved_tensors_hooks(pack, _unpacked)


def _unpacked(packed: tuple[Tensor, torch.device | None]) -> Tensor:
    tensor, device = packed
    return tensor if device is None else _copied(tensor, device)


def _copied(tensor: Tensor, device: str | torch.device, *, pin_memory: bool = False) -> Tensor:
    """Return a copy, made in the device's stream; the host does not wait for it."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=pin_memory)
    return copy.copy_(tensor, non_blocking=True)


def recompute(lm: nn.Module, count: bool | int, host: HostOffload | None = None) -> int:
    """Recompute all repeated layers, none, or the first `count`; return their number.

    The first ones, because activations of the last layers are freed before the first layer is recomputed. With `host`
    the inputs are offloaded, except that of the last recomputed layer, which is needed first.
    """
    layers = repeated_layers(lm)
    chosen = layers if count is True else layers[: int(count)]
    draws = draws_random_numbers(lm)
    for at, layer in enumerate(chosen):
        offload = partial(host.offload, at) if host and at < len(chosen) - 1 else nullcontext
        layer.forward = recomputed(layer.forward, offload, draws=draws)
    return len(chosen)


def recompute_rest(lm: nn.Module, already: int, count: int | None = None) -> int:
    """Recompute the layers after the first `already` too, up to layer `count`; return their number."""
    rest, draws = repeated_layers(lm)[already:count], draws_random_numbers(lm)
    for layer in rest:
        layer.forward = recomputed(layer.forward, draws=draws)
    return len(rest)


@contextmanager
def recomputing(lm: nn.Module) -> Iterator[None]:
    """Recompute all repeated layers, for forward and backward passes inside this context."""
    draws, forwards = draws_random_numbers(lm), {}
    for layer in repeated_layers(lm):
        if not is_recomputed(layer):
            forwards[layer] = vars(layer).get("forward")
            layer.forward = recomputed(layer.forward, draws=draws)
    try:
        yield
    finally:
        for layer, forward in forwards.items():
            if forward is None:
                del layer.forward  # back to the class method
            else:
                layer.forward = forward


def is_recomputed(layer: nn.Module) -> bool:
    """Return whether the layer is recomputed in every backward pass."""
    return hasattr(layer.forward, _IS_RECOMPUTED)


def draws_random_numbers(lm: nn.Module) -> bool:
    """Return whether a pass of `lm` may use random numbers, by its modules and configuration."""
    if has_random_modules(lm):
        return True
    config = getattr(lm, "config", None)
    return config is None or _has_rate(config.to_dict())


def has_random_modules(network: nn.Module) -> bool:
    """Return whether a module inside has dropout or noise with a rate above 0."""
    dropouts = (module for module in network.modules() if "dropout" in type(module).__name__.lower())
    has_dropout = any(getattr(module, "p", 0) for module in dropouts)
    return has_dropout or any(_has_rate(vars(module)) for module in network.modules())


def _has_rate(values: Mapping[Any, Any], *, is_named: bool = False) -> bool:
    """Return whether a number above 0 has a name with drop, noise or jitter."""
    for name, value in values.items():
        has_name = is_named or any(word in str(name) for word in _RANDOM)
        if isinstance(value, Mapping) and _has_rate(value, is_named=has_name):
            return True
        if has_name and isinstance(value, int | float) and value > 0:
            return True
    return False


def require_layers(lm: nn.Module, count: bool | int) -> None:
    """Refuse a `count` above the number of layers; `lm` may be on meta."""
    total = len(repeated_layers(lm))
    if count is not True and count > total:
        raise ConfigError(
            f"training.recompute={count}: this model has {total} layers. Set 0 to {total}, true (all), or auto."
        )


def repeated_layers(lm: nn.Module) -> list[Any]:
    """Return the repeated layers of a transformers model, from first to last."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]


def recomputed(
    forward: Callable[..., Any], offload: Callable[[], AbstractContextManager[Any]] = nullcontext, *, draws: bool = True
) -> Callable[..., Any]:
    """Return `forward`, recomputed in the backward pass.

    Without `draws`, the state of random numbers is not saved: reading it costs time in each layer.
    """

    @wraps(forward)
    def again(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with offload():
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=draws, **kwargs)

    vars(again)[_IS_RECOMPUTED] = True
    return again
