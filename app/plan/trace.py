"""One step of the engine's own stepper, and an evaluation, on tensors without memory, every storage counted."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from app.batch import Batch, Documents, Weights
from app.config.schema import RunConfig
from app.engine.anatomy import kept_tensors
from app.engine.peers import Peers
from app.engine.runtime import Runtime
from app.model.dtypes import DTYPES
from app.model.fused import fuse
from app.model.fused.unpacking import share_scratch
from app.model.hidden import HIDDEN, ON_GPU
from app.model.kernels import as_on_gpu
from app.model.linear_head import linear_head
from app.model.outline import Outline
from app.model.tasks import task_of
from app.model.trainee import Trainee
from app.optim.one_by_one import ordinary
from app.optim.optimizers import build_optimizer
from app.optim.rounding import Pieces, rounded
from app.plan import stages
from app.plan.attention import hidden_in_backward
from app.plan.counts import Counted, Trace
from app.plan.fakes import AnyNumber, Call, Paged, any_number, materialise
from app.plan.flops import FlopCounter
from app.plan.gpu import AutocastOfCuda
from app.plan.known import Known
from app.plan.lent import Sizes
from app.plan.memory_plan import Shape
from app.plan.middle import Middle, Waiting, give_what_is_kept, middles, take_turns
from app.plan.parts import Parts, disown_gradients, lending_of, reduction_of
from app.plan.passes import Evaluation, Passes, TracedStepper
from app.plan.remembering import Remembering
from app.plan.replay import Replay, Seen
from app.plan.share import DIVIDED, Nowhere, states_of
from app.plan.whose import NOBODY, LayerCounter

_ALONE = Runtime(accelerator=None, device=torch.device("cpu"), peers=Peers(rank=0, count=1), threads=1)
_HIDDEN_ON_GPU = {**ON_GPU, "app_plan::attention_backward": hidden_in_backward}


@dataclass(frozen=True, slots=True)
class Asked:
    """What is traced, but for its depth."""

    run: RunConfig
    precision: str
    shape: Shape
    evaluated: Shape | None  # None: no evaluation is traced
    on_gpu: bool
    parts: Parts | None = None  # where a model is divided among processes


def trace(asked: Asked, outline: Outline, plain: int, recomputed: int, known: Known) -> Trace:
    """Of a model of so many layers that keep everything and so many, the first ones, that do not.

    Passes that are known are not made again.
    """
    flops, network = FlopCounter(), outline.network(plain + recomputed)
    lends = asked.parts is not None and asked.parts.lends
    bare = outline.bare(plain + recomputed) if lends else None
    ways = as_on_gpu() if asked.on_gpu else nullcontext()
    with ways, rounded(Pieces.UNLIKE), FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        call = Remembering(fakes)
        with AnyNumber(call):
            ready = _ready(asked, network, bare, recomputed, flops, call)
            passes = _passes(asked, outline, (plain, recomputed), known)
            ready.stepper.watched(ready.counter, flops, passes, ready.among)
        trainee, stepper, counter = ready.trainee, ready.stepper, ready.counter
        with counter, AutocastOfCuda() if asked.on_gpu else nullcontext():
            result = stepper.run([ready.batch], lr=1e-4)
            length = len(counter.events)
            of_step = flops.counted()
            counter.enter(stages.SAVE)
            kinds = _kinds_of_gradients(ready, divided=asked.parts is not None)
            if ready.evaluated is not None:
                stepper.forget_gradients()
                counter.enter(stages.EVALUATION)
                evaluation = _evaluation(asked, outline, plain + recomputed, known)
                evaluation.make(counter, partial(trainee.eval().scores, ready.evaluated))
            kinds |= counter.kinds
        of_all = asked.parts is not None and asked.parts.part is None
        states = states_of(stepper.optimizer) if of_all else None
        seen = Seen(list(counter.events), list(counter.phases), kinds, counter.owners(), list(counter.turns))
        del result
    left_out = {serial for serial, kind in kinds.items() if states is not None and kind in DIVIDED}
    counted = Counted(
        worst=Replay(seen).phases(),
        kept=seen.held(),
        flops=of_step,
        on_host=ready.on_host(),
        offloaded={} if ready.host is None else ready.host.offloaded(),
    )
    return Trace(
        numbers=counted.numbers(),
        more={each.sort: counted.more(each.sort) for each in ready.among},
        states=states,
        lent=ready.lent,
        events=tuple(event for event in seen.events[:length] if event[0] not in left_out),
    )


def _kinds_of_gradients(ready: "_Ready", *, divided: bool) -> dict[int, str]:
    """Of those that are left after a step. A layer's are its own, but where they are parts of buckets."""
    for middle in [] if divided else ready.among:
        ready.counter.give(middle.sort, [each.grad for each in middle.trained if each.grad is not None])
    given = (each.grad for each in ready.trainee.trained().values() if each.grad is not None)
    serials = (ready.counter.serial_of(each) for each in given)
    return {serial: "gradients" for serial in serials if serial is not None}


@dataclass(frozen=True, slots=True)
class _Ready:
    """What a step needs, and what looks at it."""

    trainee: Trainee
    stepper: TracedStepper
    counter: LayerCounter
    paged: Paged
    host: Waiting | None
    batch: Batch
    evaluated: Batch | None
    lent: Sizes
    among: list[Middle]

    def on_host(self) -> dict[int, int]:
        """Bytes of states: of all under nobody, and of each layer that stands for others."""
        own = {each.sort: each.host_bytes(self.stepper.optimizer) for each in self.among}
        return own | {NOBODY: self.paged.host_bytes}


def _ready(
    asked: Asked,
    network: nn.Module,
    bare: nn.Module | None,
    recomputed: int,
    flops: FlopCounter,
    call: Call,
) -> _Ready:
    """After a first step."""
    run, paged = asked.run, Paged()
    materialise(network)
    trainee = _trainee(asked, network)
    trainee.lending, lent = lending_of(asked.parts, trainee, bare)
    wire = Nowhere()
    reduction = reduction_of(asked.parts, trainee, wire)
    optimizer = _optimizer(asked, trainee, paged, reduction.stepped)
    fp16 = asked.precision == "fp16"
    stepper = TracedStepper(trainee, optimizer, _ALONE, run.training.clip, fp16=fp16, reduction=reduction)
    counter = _counter(asked, trainee, optimizer, flops, partial(any_number, call))
    counter.hold("gradients", reduction.gradients())
    if asked.parts is not None:
        disown_gradients(trainee, wire, counter)
    if run.adapter.fused:
        share_scratch(network, DTYPES[asked.precision].base, proven=False)
        trainee.fused = fuse(network, None)
    host = Waiting("meta" if asked.on_gpu else "cpu", counter) if run.training.offload else None
    among = middles(trainee, recomputed)
    give_what_is_kept(among, optimizer, counter)
    stages.watch(trainee, optimizer, counter, flops, recomputed, host)
    for middle in among:
        take_turns(middle, counter)
    if asked.shape.micro_batches > 1 and asked.parts is None:
        trainee.register_forward_pre_hook(_leave_gradients)
    batch = _batch(asked.shape)
    evaluated = None if asked.evaluated is None else _batch(asked.evaluated)
    given = [*batch.tensors, *(evaluated.tensors if evaluated else [])]
    if asked.on_gpu:
        counter.hold("temporary", given)  # copies
    else:
        counter.ignore(given)
    return _Ready(trainee, stepper, counter, paged, host, batch, evaluated, lent, among)


def _passes(asked: Asked, outline: Outline, depth: tuple[int, int], known: Known) -> Passes:
    """Inputs that wait on the host are counted as they go there."""
    run = asked.run
    if run.optimizer.in_backward or run.training.offload:
        return Passes()
    return known.passes.of(Passes, outline.of_any_recompute, asked.shape, asked.on_gpu, asked.parts, depth)


def _evaluation(asked: Asked, outline: Outline, depth: int, known: Known) -> Evaluation:
    built = outline.of_any_recompute
    return known.evaluations.of(Evaluation, built, asked.evaluated, asked.on_gpu, asked.parts, depth)


def _counter(
    asked: Asked, trainee: Trainee, optimizer: Optimizer, flops: FlopCounter, call: Call
) -> LayerCounter:
    """That knows what is there before the step."""
    hidden = _HIDDEN_ON_GPU if asked.on_gpu else HIDDEN
    counter = LayerCounter("cpu", hidden, flops, call, flops=flops)
    if trainee.lending is not None:
        # the step of the optimizer has touched them, which gives them memory here
        counter.ignore(trainee.lending.away)
    for kind, tensors in kept_tensors(trainee, optimizer).items():
        counter.hold(kind, tensors)
    return counter


def _trainee(asked: Asked, network: nn.Module) -> Trainee:
    """With the head that a run would prove."""
    pooled = task_of(asked.run.task).pooled
    trainee = Trainee(network, DTYPES[asked.precision].compute, pooled=pooled).train()
    trainee.linear = None if pooled else linear_head(trainee.language_model)
    return trainee


def _optimizer(asked: Asked, trainee: Trainee, paged: Paged, stepped: Sequence[nn.Parameter]) -> Optimizer:
    """With states as after the first step: the second one is where the peak is."""
    optimizer = build_optimizer(asked.run.optimizer, trainee, asked.run.seed, stepped)
    paged.take_from(ordinary(optimizer), on_gpu=asked.on_gpu)
    for parameter in stepped:
        parameter.grad = torch.empty_like(parameter)
    with rounded(Pieces.NONE):  # which leaves nothing behind, and nobody counts here
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


def _leave_gradients(trainee: nn.Module, _given: Any) -> None:
    """Those of the micro-batches before: of several the last is traced, and none takes more."""
    for parameter in trainee.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)


def _batch(shape: Shape) -> Batch:
    """On the host, as a loader gives it."""
    documents = None
    if shape.documents:
        bounds = torch.zeros(shape.places + 1, dtype=torch.int32)
        documents = Documents(shape.documents, bounds, shape.longest)
    return Batch(
        ids=torch.zeros(shape.rows, shape.width, dtype=torch.int64),
        positions=torch.zeros(shape.rows, shape.width, dtype=torch.int64),
        label_rows=torch.zeros(shape.label_rows, dtype=torch.int64),
        targets=torch.zeros(shape.label_rows, dtype=torch.int64),
        lengths=shape.documents or (shape.width,) * shape.rows,
        num_labels=shape.label_rows,
        num_tokens=shape.tokens,
        documents=documents,
        weights=Weights(torch.ones(shape.label_rows), float(shape.label_rows)) if shape.weighted else None,
        segments=torch.zeros(shape.rows, shape.width, dtype=torch.int64) if shape.pairs else None,
    )
