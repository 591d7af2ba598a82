"""One step of the training's own stepper, and an evaluation, on fake tensors, every storage counted."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from app.batch import Batch, LossWeights, PackedSequences
from app.config.schema import RunConfig
from app.distributed.fake_process_group import fake_device_mesh
from app.distributed.fsdp import MeshSizes, Sharding, first_number, is_sharded
from app.distributed.gradient_reduction import GradientReduction, ShardedGradients, SingleProcess
from app.distributed.process_group import HostGroup, Runtime
from app.memory.cuda_ops import GPU_WORKSPACE, AutocastOfCuda, PagedStates
from app.memory.fake_tensors import FakeAnswers, materialise
from app.memory.flops import Arithmetic
from app.memory.outline import Outline
from app.memory.phases import BETWEEN, EVALUATION, HOST, KEPT, SAVE, peaks, watch
from app.memory.shape import Shape
from app.model.activation_checkpointing import HostOffload, repeated_layers
from app.model.build import DTYPES
from app.model.chunked_loss import linear_head
from app.model.fusion import fuse
from app.model.kernels import as_on_gpu
from app.model.tasks import task_of
from app.model.training_model import TrainingModel
from app.optim.optimizers import build_optimizer, needs_whole_matrices
from app.optim.stochastic_rounding import ordinary
from app.training.storage_counter import CPU_WORKSPACE, StorageCounter, kept_tensors
from app.training.train_step import Stepper

_ALONE = Runtime(accelerator=None, device=torch.device("cpu"), peers=HostGroup(rank=0, count=1), threads=1)

# All that a plan is made of, by name; bytes at the worst instant of a phase by phase and kind
Numbers = dict[tuple[str, ...], int]


@dataclass(frozen=True, slots=True)
class Traced:
    """What is traced, but for its depth."""

    run: RunConfig
    precision: str
    shape: Shape
    evaluated: Shape | None  # None: no evaluation is traced
    on_gpu: bool
    mesh_sizes: MeshSizes | None = None  # None: every process has the whole model

    @property
    def passes(self) -> int:
        """Micro-batches that are traced. Where gradients are sharded the second one is like all later ones."""
        return min(self.shape.micro_batches, 2) if self.mesh_sizes else 1

    @property
    def shards_on_host(self) -> bool:
        """Whether shards, their gradients and states are in another memory, which a CPU does not have."""
        return self.on_gpu and self.mesh_sizes is not None and self.run.parallel.offload


def trace(traced: Traced, outline: Outline, plain: int, recomputed: int) -> Numbers:
    """Count a model of `recomputed` layers that are computed again in backward, and `plain` layers after them."""
    network, arithmetic = outline.network(plain + recomputed), Arithmetic()
    with ExitStack() as modes:
        sharding = None if traced.mesh_sizes is None else modes.enter_context(_sharding(traced))
        if traced.on_gpu:
            modes.enter_context(as_on_gpu())
        modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        modes.enter_context(FakeAnswers())  # type: ignore[no-untyped-call]
        ready = _ready(traced, network, recomputed, arithmetic, sharding)
        if traced.on_gpu:
            modes.enter_context(AutocastOfCuda())
        return _counted(ready, arithmetic, traced)


@contextmanager
def _sharding(traced: Traced) -> Iterator[Sharding]:
    sizes, parallel = traced.mesh_sizes, traced.run.parallel
    assert sizes is not None
    with fake_device_mesh(sizes) as mesh:
        yield Sharding(
            mesh, reshard=parallel.reshard, sync_each=parallel.sync == "each", offload=parallel.offload
        )


@dataclass(frozen=True, slots=True)
class _Ready:
    """A step that can be run, and its counters."""

    stepper: Stepper
    counter: StorageCounter
    paged: PagedStates
    host: HostOffload | None
    batch: Batch
    evaluated: Batch | None


def _counted(ready: _Ready, arithmetic: Arithmetic, traced: Traced) -> Numbers:
    stepper, counter, passes = ready.stepper, ready.counter, traced.passes
    with arithmetic.mode, counter:
        result = stepper.run([ready.batch] * passes, lr=1e-4)
    counter.enter(SAVE)
    given = (each.grad for each in stepper.trainee.trained().values() if each.grad is not None)
    gradients = [counter.serial_of(each) for each in given]
    if ready.evaluated is not None:
        stepper.forget_gradients()
        counter.enter(EVALUATION)
        with counter:
            stepper.trainee.eval().scores(ready.evaluated)
    del result  # its numbers are there until the run has read them
    of_gradients = HOST if traced.shards_on_host else "gradients"
    kinds = {**counter.kinds, **{serial: of_gradients for serial in gradients if serial is not None}}
    sizes = {serial: size for serial, size in reversed(counter.events) if size > 0}
    worst = peaks(counter.events, counter.phases, kinds)
    numbers: Numbers = {
        (phase, kind): size
        for phase, of_kinds in worst.items()
        if phase != BETWEEN  # no larger than both phases that it lies between, and some depths lack it
        for kind, size in of_kinds.items()
    }
    on_host = [sizes.get(serial, 0) for serial, kind in kinds.items() if kind == HOST]
    return numbers | {
        ("kept",): sum(sizes.get(serial, 0) for serial, kind in kinds.items() if kind in KEPT),
        ("host",): ready.paged.host_bytes + sum(on_host),
        ("offloaded",): 0 if ready.host is None else ready.host.bytes,
        **{(name,): count for name, count in arithmetic.counted(passes).items()},
    }


def _ready(
    traced: Traced, network: nn.Module, recomputed: int, arithmetic: Arithmetic, sharding: Sharding | None
) -> _Ready:
    """A second step: the first one makes the optimizer's states."""
    run, paged = traced.run, PagedStates()
    materialise(network)
    trainee = _trainee(traced, network)
    if sharding is not None:
        sharding.divide(trainee, repeated_layers(trainee.language_model), ["scores"])
        trainee.divided_by(sharding)
    reduction = _reduction(traced, trainee, sharding)
    optimizer = _optimizer(traced, trainee, reduction, paged)
    fp16 = traced.precision == "fp16"
    stepper = Stepper(trainee, optimizer, _ALONE, run.training.clip, fp16=fp16, reduction=reduction)
    counter = StorageCounter("cpu", GPU_WORKSPACE if traced.on_gpu else CPU_WORKSPACE)
    if traced.shards_on_host:
        counter.hold(HOST, [each for each in network.parameters() if is_sharded(each)])
        counter.hold(HOST, kept_tensors(trainee, optimizer)["optimizer_states"])
    for kind, tensors in kept_tensors(trainee, optimizer).items():
        counter.hold(kind, [each for each in tensors if counter.kind_of(each) != HOST])
    host = HostOffload("meta" if traced.on_gpu else "cpu") if run.training.offload else None
    watch(stepper, counter, arithmetic, recomputed, host)
    if traced.shape.micro_batches > 1 and traced.passes == 1:
        trainee.register_forward_pre_hook(_leave_gradients)
    batch = _batch(traced.shape)
    evaluated = None if traced.evaluated is None else _batch(traced.evaluated)
    given = [*batch.tensors, *(evaluated.tensors if evaluated else [])]
    if traced.on_gpu:
        counter.hold("temporary", given)  # copies
    else:
        counter.ignore(given)
    return _Ready(stepper, counter, paged, host, batch, evaluated)


def _trainee(traced: Traced, network: nn.Module) -> TrainingModel:
    """With the head that a run would use after its check."""
    pooled = task_of(traced.run.task).pooled
    trainee = TrainingModel(network, DTYPES[traced.precision].compute, pooled=pooled).train()
    trainee.linear = None if pooled else linear_head(trainee.language_model)
    if traced.run.adapter.fused:
        trainee.fused = fuse(network, None)
    return trainee


def _reduction(traced: Traced, trainee: TrainingModel, sharding: Sharding | None) -> GradientReduction:
    trained = list(trainee.trained().values())
    if sharding is None:
        return SingleProcess(trained)
    return ShardedGradients(trained, sharding, whole_matrices=needs_whole_matrices(traced.run.optimizer))


def _optimizer(
    traced: Traced, trainee: TrainingModel, reduction: GradientReduction, paged: PagedStates
) -> Optimizer:
    """With states as after the first step: the second one is where the peak is."""
    shards = None
    if isinstance(reduction, ShardedGradients) and reduction.local:
        shards = {each: (own, first_number(each)) for each, own in reduction.local.items()}
    optimizer = build_optimizer(traced.run.optimizer, trainee, traced.run.seed, shards)
    if traced.on_gpu:  # to a CPU the host is no other memory
        paged.take_from(ordinary(optimizer))
    for parameter in reduction.stepped:
        parameter.grad = torch.empty_like(parameter)
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
        documents = PackedSequences(shape.documents, bounds, shape.longest)
    return Batch(
        ids=torch.zeros(shape.rows, shape.width, dtype=torch.int64),
        positions=torch.zeros(shape.rows, shape.width, dtype=torch.int64),
        label_rows=torch.zeros(shape.label_rows, dtype=torch.int64),
        targets=torch.zeros(shape.label_rows, dtype=torch.int64),
        lengths=shape.documents or (shape.width,) * shape.rows,
        num_labels=shape.label_rows,
        num_tokens=shape.tokens,
        documents=documents,
        weights=LossWeights(torch.ones(shape.label_rows), float(shape.label_rows))
        if shape.weighted
        else None,
        token_type_ids=torch.zeros(shape.rows, shape.width, dtype=torch.int64) if shape.pairs else None,
    )
