"""Where in its step a traced trainee is: told to the counter by hooks that leave the graph alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from app.model.offload import Host
from app.model.recompute import recompute, repeated_layers
from app.model.trainee import Trainee
from app.plan.flops import FlopCounter
from app.plan.whose import LayerCounter

FORWARD, HEAD, HEAD_BACKWARD, CLIP, OPTIMIZER = "forward", "head", "backward of the head", "clip", "optimizer"
SAVE, EVALUATION = "save", "evaluation"
TOP, LOWEST_KEPT, TOP_AGAIN, SECOND, BOTTOM, BETWEEN = (
    "backward, last layer",
    "backward, first layer that keeps all",
    "backward, last recomputed layer",
    "backward, second layer",  # told apart where inputs wait on the host: the lowest one beside which another is back
    "backward, first layer",
    "backward, layers between",
)
ORDER = (
    *(FORWARD, HEAD, HEAD_BACKWARD, TOP, LOWEST_KEPT, BETWEEN, TOP_AGAIN, SECOND, BOTTOM, CLIP, OPTIMIZER),
    *(SAVE, EVALUATION),
)


def backward_of(layer: int, plain: int, recomputed: int, *, offloads: bool = False) -> str:
    """The first `recomputed` layers are computed again. Between these places nothing is larger than at both."""
    second = {1: SECOND} if offloads and recomputed > 1 else {}
    places = second | {
        plain + recomputed - 1: TOP,
        recomputed - 1: TOP_AGAIN,
        recomputed: LOWEST_KEPT,
        0: BOTTOM,
    }
    if layer == plain + recomputed - 1:
        return TOP
    return places.get(layer, BETWEEN)


def watch(
    trainee: Trainee,
    optimizer: Optimizer,
    counter: LayerCounter,
    flops: FlopCounter,
    recomputed: int,
    host: Host | None,
) -> None:
    """Every stage enters itself; recomputes the first layers."""
    lm = trainee.language_model
    layers = repeated_layers(lm)
    for at, layer in enumerate(layers):
        name = backward_of(at, len(layers) - recomputed, recomputed, offloads=host is not None)
        layer.forward = _told_apart(layer.forward, flops)
        layer.register_forward_hook(_before_backward(partial(counter.enter, name)))
    recompute(lm, recomputed, host)

    def begin(_module: Any, _args: Any) -> None:
        flops.again = False
        counter.enter(FORWARD)

    def begin_update(*_given: Any) -> None:
        flops.updates = True
        counter.enter(OPTIMIZER)

    def turn_back() -> None:
        counter.enter(HEAD_BACKWARD)
        flops.again = True
        torch.autograd.Variable._execution_engine.queue_callback(lambda: counter.enter(CLIP))

    def reach_head(_module: Any, _args: Any, _out: Any) -> None:
        if trainee.training:
            counter.enter(HEAD)

    trainee.register_forward_pre_hook(begin)
    lm.base_model.register_forward_hook(reach_head)
    trainee.register_forward_hook(_before_backward(turn_back))
    optimizer.register_step_pre_hook(begin_update)


def _before_backward(enter: Callable[[], None]) -> Callable[[Any, Any, Any], None]:
    def hook(_module: Any, _args: Any, out: Any) -> None:
        tensor = out[0] if isinstance(out, tuple) else out
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(lambda _gradient: enter())

    return hook


def _told_apart(forward: Callable[..., Any], flops: FlopCounter) -> Callable[..., Any]:
    """What a layer computes once backward has begun, it computes again."""

    def run(*args: Any, **kwargs: Any) -> Any:
        flops.repeats = flops.again
        try:
            return forward(*args, **kwargs)
        finally:
            flops.repeats = False

    return run
