"""The phases of a traced step, and the most that is alive in each of them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn
from torch.optim import Optimizer

from app.memory.flops import Arithmetic
from app.model.activation_checkpointing import HostOffload, recompute, repeated_layers
from app.training.storage_counter import Event, StorageCounter
from app.training.train_step import Stepper

# What is there from step to step.
KEPT = ("frozen_weights", "quantization_constants", "trained_weights", "gradients", "optimizer_states")
HOST = "host"  # of another memory than the one that is planned
# How the bytes at a peak are divided; they add up to it.
ANATOMY = (
    *KEPT,
    "gathered_weights",  # of layers that compute, where the model is sharded
    "saved_activations",  # kept from forward for backward
    "temporary",  # of forward, backward and optimizer; what is computed again counts here
    "loss_head",  # logits and what is made of them
)

EMBEDDINGS = "forward, embeddings"  # told apart with sharding: embeddings and head are gathered in it
FORWARD, HEAD, HEAD_BACKWARD, CLIP, OPTIMIZER = "forward", "head", "backward of the head", "clip", "optimizer"
SAVE, EVALUATION = "save", "evaluation"
TOP, NEXT_TO_TOP, LOWEST_KEPT, NEXT_TO_LOWEST_KEPT, TOP_AGAIN, NEXT_TO_TOP_AGAIN, SECOND, BOTTOM, BETWEEN = (
    "backward, last layer",
    "backward, last layer but one",
    "backward, first layer that keeps all",
    "backward, second layer that keeps all",
    "backward, last recomputed layer",
    "backward, last recomputed layer but one",
    "backward, second layer",
    "backward, first layer",
    "backward, layers between",
)
ORDER = (
    *(EMBEDDINGS, FORWARD, HEAD, HEAD_BACKWARD, TOP, NEXT_TO_TOP, NEXT_TO_LOWEST_KEPT, LOWEST_KEPT, BETWEEN),
    *(TOP_AGAIN, NEXT_TO_TOP_AGAIN, SECOND, BOTTOM, CLIP, OPTIMIZER, SAVE, EVALUATION),
)
_OF_STEPPER = {"forward": FORWARD, "backward": HEAD_BACKWARD, "update": CLIP}


def backward_of(
    layer: int, plain: int, recomputed: int, *, offloads: bool = False, shards: bool = False
) -> str:
    """The phase of one layer's backward; the first `recomputed` layers are computed again.

    What is alive in the layers between two of these phases is at most what is alive in one of the two. With offloaded
    inputs the second layer is a phase of its own: the lowest one beside which another input is back. With sharding so
    are all neighbours of first and last layers: weights are gathered one layer ahead, and gradients of the layer
    before are still being reduced.
    """
    last = plain + recomputed - 1
    if layer == last:
        return TOP
    phases = {recomputed - 1: TOP_AGAIN, recomputed: LOWEST_KEPT, 0: BOTTOM}
    if (offloads and recomputed > 1) or shards:
        phases = {1: SECOND} | phases
    if shards:
        neighbours = {
            recomputed - 2: NEXT_TO_TOP_AGAIN,
            recomputed + 1: NEXT_TO_LOWEST_KEPT,
            last - 1: NEXT_TO_TOP,
        }
        phases = neighbours | phases
    return phases.get(layer, BETWEEN)


def watch(
    stepper: Stepper,
    counter: StorageCounter,
    arithmetic: Arithmetic,
    recomputed: int,
    host: HostOffload | None,
) -> None:
    """Make every phase of the stepper known to the counters as it begins, and recompute the first layers."""
    trainee = stepper.trainee
    lm = trainee.language_model
    layers = repeated_layers(lm)
    offloads, shards = host is not None, trainee.sharding is not None
    for at, layer in enumerate(layers):
        name = backward_of(at, len(layers) - recomputed, recomputed, offloads=offloads, shards=shards)
        layer.forward = arithmetic.telling_repeats(layer.forward)
        layer.register_forward_hook(_before_backward(partial(counter.enter, name)))
    recompute(lm, recomputed, host)

    def enter(phase: str) -> None:
        arithmetic.in_backward = phase == "backward"
        counter.enter(EMBEDDINGS if shards and phase == "forward" else _OF_STEPPER[phase])

    def begin_update(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        arithmetic.end_passes()
        counter.enter(OPTIMIZER)

    stepper.on_phase = enter
    if shards:
        layers[0].register_forward_pre_hook(_in_training(trainee, partial(counter.enter, FORWARD)))
    lm.base_model.register_forward_hook(_in_training(trainee, partial(counter.enter, HEAD)))
    stepper.optimizer.register_step_pre_hook(begin_update)


def _in_training(trainee: nn.Module, enter: Callable[[], None]) -> Callable[..., None]:
    def hook(*_given: Any) -> None:
        if trainee.training:
            enter()

    return hook


def _before_backward(enter: Callable[[], None]) -> Callable[[Any, Any, Any], None]:
    def hook(_module: Any, _args: Any, out: Any) -> None:
        tensor = out[0] if isinstance(out, tuple) else out
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(lambda _gradient: enter())

    return hook


def peaks(
    events: Sequence[Event], phases: Sequence[tuple[int, str]], kinds: Mapping[int, str]
) -> dict[str, dict[str, int]]:
    """Bytes by kind at the worst instant of each phase; one that is reached more than once is one.

    `phases` are given by the event that each begins with, `kinds` by storage, of those that are kept.
    """
    bounds = [(0, ""), *phases, (len(events), "")]
    named = _all_kinds(events, bounds, kinds)
    alive: dict[str, int] = {}
    worst: dict[str, tuple[int, dict[str, int]]] = {}
    for (start, phase), (end, _) in pairwise(bounds):
        total = sum(alive.values())
        most = worst[phase][0] if phase in worst else -1
        if total > most:
            most, worst[phase] = total, (total, dict(alive))
        for serial, size in events[start:end]:
            kind = named[serial]
            if kind == HOST:
                continue
            alive[kind] = alive.get(kind, 0) + size
            total += size
            if total > most:
                most, worst[phase] = total, (total, dict(alive))
    worst.pop("")  # what was there before
    return {phase: of_kinds for phase, (_, of_kinds) in worst.items()}


def _all_kinds(
    events: Sequence[Event], bounds: Sequence[tuple[int, str]], kinds: Mapping[int, str]
) -> dict[int, str]:
    """Storages of forward that outlive it are saved activations, all others temporary or of the head."""
    named = dict(kinds)
    gone = {serial: at for at, (serial, size) in enumerate(events) if size < 0}
    for (start, phase), (end, _) in pairwise(bounds):
        for serial, size in events[start:end]:
            if size > 0 and serial not in named:
                named[serial] = _kind(phase, survives=gone.get(serial, end) >= end)
    return named


def _kind(phase: str, *, survives: bool) -> str:
    if phase in (HEAD, HEAD_BACKWARD):
        return "loss_head"
    return "saved_activations" if phase in (EMBEDDINGS, FORWARD) and survives else "temporary"
