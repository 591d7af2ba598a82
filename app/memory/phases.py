"""Phases of a traced step, and the peak of memory in each of them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn
from torch.optim import Optimizer

from app.layers.activation_checkpointing import repeated_layers
from app.memory.flops import StepFlops
from app.training.storage_counter import Event, StorageCounter
from app.training.train_step import Stepper

# Kinds that stay allocated from step to step.
PERSISTENT_KINDS = ("frozen_weights", "quantization_constants", "trained_weights", "gradients", "optimizer_states")
HOST = "host"  # in host memory, not part of the planned peak
# Kinds of bytes at a peak; their sum is the peak.
MEMORY_KINDS = (
    *PERSISTENT_KINDS,
    "gathered_weights",  # all-gathered layers of a sharded model
    "saved_activations",  # stored by forward for backward
    "temporary",  # of forward, backward and optimizer, recomputation included
    "loss_head",  # logits and their gradients
    "workspaces",  # of cuBLAS, on a GPU
)

BEGIN = "init of the adapter"  # from the inputs of its layers
EMBEDDINGS = "forward, embeddings"  # only with sharding, which gathers embeddings and head in it
FORWARD, HEAD, HEAD_BACKWARD, CLIP, OPTIMIZER = "forward", "head", "backward of the head", "clip", "optimizer"
SAVE, EVALUATION = "save", "evaluation"
BACKWARD_LAST = "backward, last layer"
BACKWARD_SECOND_LAST = "backward, last layer but one"
BACKWARD_FIRST_STORED = "backward, first layer that keeps all"
BACKWARD_SECOND_STORED = "backward, second layer that keeps all"
BACKWARD_LAST_RECOMPUTED = "backward, last recomputed layer"
BACKWARD_SECOND_LAST_RECOMPUTED = "backward, last recomputed layer but one"
BACKWARD_SECOND = "backward, second layer"
BACKWARD_FIRST = "backward, first layer"
BACKWARD_BETWEEN = "backward, layers between"
PHASES = (  # in order of execution
    *(BEGIN, EMBEDDINGS, FORWARD, HEAD, HEAD_BACKWARD),
    *(BACKWARD_LAST, BACKWARD_SECOND_LAST, BACKWARD_SECOND_STORED, BACKWARD_FIRST_STORED, BACKWARD_BETWEEN),
    *(BACKWARD_LAST_RECOMPUTED, BACKWARD_SECOND_LAST_RECOMPUTED, BACKWARD_SECOND, BACKWARD_FIRST),
    *(CLIP, OPTIMIZER, SAVE, EVALUATION),
)
_PHASE_OF_STEPPER = {"forward": FORWARD, "backward": HEAD_BACKWARD, "update": CLIP}


def backward_phase(layer: int, plain: int, recomputed: int, *, shards: bool = False) -> str:
    """Name the phase of the backward pass of one layer; the first `recomputed` layers are recomputed.

    Memory in the layers between two of these phases never exceeds the larger of the two. The second layer has a phase
    of its own: the first one computes no gradient for its input and prefetches no input from the host. With sharding
    the neighbors of first and last layers have their own, too: weights are all-gathered one layer ahead while gradients
    of the layer before are still being reduced.
    """
    last = plain + recomputed - 1
    if layer == last:
        return BACKWARD_LAST
    phases = {recomputed - 1: BACKWARD_LAST_RECOMPUTED, recomputed: BACKWARD_FIRST_STORED, 0: BACKWARD_FIRST}
    if recomputed > 1 or shards:
        phases = {1: BACKWARD_SECOND} | phases
    if shards:
        neighbours = {
            recomputed - 2: BACKWARD_SECOND_LAST_RECOMPUTED,
            recomputed + 1: BACKWARD_SECOND_STORED,
            last - 1: BACKWARD_SECOND_LAST,
        }
        phases = neighbours | phases
    return phases.get(layer, BACKWARD_BETWEEN)


def register_phases(stepper: Stepper, counter: StorageCounter, step_flops: StepFlops, recomputed: int) -> None:
    """Register hooks that report each phase to the counters."""
    training_model = stepper.model
    lm = training_model.language_model
    layers = repeated_layers(lm)
    shards = training_model.sharding is not None
    for at, layer in enumerate(layers):
        name = backward_phase(at, len(layers) - recomputed, recomputed, shards=shards)
        layer.register_forward_hook(_before_backward(partial(counter.enter, name)))

    def enter(phase: str) -> None:
        step_flops.in_backward = phase == "backward"
        counter.enter(EMBEDDINGS if shards and phase == "forward" else _PHASE_OF_STEPPER[phase])

    def begin_update(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        step_flops.end_passes()
        counter.enter(OPTIMIZER)

    stepper.on_phase = enter
    if shards:
        layers[0].register_forward_pre_hook(_in_training(training_model, partial(counter.enter, FORWARD)))
    lm.base_model.register_forward_hook(_in_training(training_model, partial(counter.enter, HEAD)))
    stepper.optimizer.register_step_pre_hook(begin_update)


def _in_training(training_model: nn.Module, enter: Callable[[], None]) -> Callable[..., None]:
    def hook(*_args: Any) -> None:
        if training_model.training:
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
    """Bytes by kind at the peak of each phase; a phase that is entered several times counts as one.

    `phases`: index of the first event and name. `kinds`: kinds of persistent storages by serial number.
    """
    bounds = [(0, ""), *phases, (len(events), "")]
    named = _kinds_by_storage(events, bounds, kinds)
    alive: dict[str, int] = {}
    worst: dict[str, tuple[int, dict[str, int]]] = {}
    for (start, phase), (end, _) in pairwise(bounds):
        total = sum(alive.values())
        peak = worst[phase][0] if phase in worst else -1
        if total > peak:
            peak, worst[phase] = total, (total, dict(alive))
        for serial, size in events[start:end]:
            kind = named[serial]
            if kind == HOST:
                continue
            alive[kind] = alive.get(kind, 0) + size
            total += size
            if total > peak:
                peak, worst[phase] = total, (total, dict(alive))
    worst.pop("")  # before the first phase
    return {phase: of_kinds for phase, (_, of_kinds) in worst.items()}


def _kinds_by_storage(
    events: Sequence[Event], bounds: Sequence[tuple[int, str]], kinds: Mapping[int, str]
) -> dict[int, str]:
    """Kinds of all storages: those of forward that outlive it are saved activations, others temporary or loss head."""
    named = dict(kinds)
    freed = {serial: at for at, (serial, size) in enumerate(events) if size < 0}
    for (start, phase), (end, _) in pairwise(bounds):
        for serial, size in events[start:end]:
            if size > 0 and serial not in named:
                named[serial] = _kind(phase, survives=freed.get(serial, end) >= end)
    return named


def _kind(phase: str, *, survives: bool) -> str:
    if phase in (HEAD, HEAD_BACKWARD):
        return "loss_head"
    return "saved_activations" if phase in (EMBEDDINGS, FORWARD) and survives else "temporary"
