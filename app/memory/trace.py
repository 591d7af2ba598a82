"""Trace of one training step and one evaluation on fake tensors, with every storage and FLOP counted."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from app.batch import Batch, LossWeights, PackedSequences
from app.config.schema import RunConfig
from app.distributed.fake_process_group import fake_device_mesh
from app.distributed.fsdp import MeshSizes, Sharding, first_number, is_sharded
from app.distributed.gradient_reduction import GradientReduction, ShardedGradients
from app.distributed.process_group import HostGroup, Runtime
from app.memory.cuda_ops import CudaAutocast, PagedStates
from app.memory.fake_tensors import PLANNED_AS, FakeTensorFallbacks, materialise
from app.memory.flops import StepFlops
from app.memory.meta_model import MetaModel
from app.memory.phases import BACKWARD_BETWEEN, EVALUATION, HOST, PERSISTENT_KINDS, SAVE, peaks, register_phases
from app.memory.shape import Shape
from app.model.activation_checkpointing import HostOffload, repeated_layers
from app.model.build import DTYPES, ModelSections
from app.model.chunked_loss import linear_head
from app.model.fusion import fuse
from app.model.kernels import as_on_gpu
from app.model.training_model import TrainingModel
from app.optim.optimizers import build_optimizer, needs_whole_matrices
from app.optim.stochastic_rounding import ordinary
from app.training.storage_counter import StorageCounter, kept_tensors
from app.training.train_step import Stepper

_SINGLE_PROCESS = Runtime(
    accelerator=None, device=torch.device("cpu"), host_group=HostGroup(rank=0, count=1), threads=1
)

# Totals by name, and bytes at the peak of each phase by phase and kind
Numbers = dict[tuple[str, ...], int]


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Settings of a trace, except the number of layers."""

    run: RunConfig
    precision: str
    shape: Shape
    evaluated: Shape | None  # None: no evaluation is traced
    on_gpu: bool
    mesh_sizes: MeshSizes | None = None  # None: the model is not sharded

    @property
    def passes(self) -> int:
        """Micro-batches to trace: with sharded gradients the second one equals all later ones."""
        return min(self.shape.micro_batches, 2) if self.mesh_sizes else 1

    @property
    def shards_on_host(self) -> bool:
        """Whether shards, their gradients and states are outside the planned memory; on a CPU both are the same."""
        return self.on_gpu and self.mesh_sizes is not None and self.run.parallel.offload


def trace(settings: TraceSettings, meta_model: MetaModel, plain: int, recomputed: int) -> Numbers:
    """Trace a model whose first `recomputed` layers are recomputed in backward, followed by `plain` layers.

    The traced step is the second one of a run: the first one creates the optimizer states.
    """
    run, network, step_flops, paged = settings.run, meta_model.network(plain + recomputed), StepFlops(), PagedStates()
    with ExitStack() as modes:
        sharding = None if settings.mesh_sizes is None else modes.enter_context(_sharding(settings))
        if settings.on_gpu:
            modes.enter_context(as_on_gpu())
        modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        modes.enter_context(FakeTensorFallbacks())  # type: ignore[no-untyped-call]
        materialise(network, meta_model.sections)
        training_model = _training_model(settings, network, meta_model.sections, sharding)
        stepper = _stepper(settings, training_model, sharding, paged)
        batch = _batch(settings.shape)
        evaluated = None if settings.evaluated is None else _batch(settings.evaluated)
        counter = _counter(settings, stepper, [batch, *([evaluated] if evaluated else [])])
        host = HostOffload("meta" if settings.on_gpu else "cpu") if run.training.offload else None
        if settings.on_gpu:
            for layer in repeated_layers(training_model.language_model):
                layer.forward = CudaAutocast.also_in_backward(layer.forward)
        register_phases(stepper, counter, step_flops, recomputed, host)
        if settings.on_gpu:
            modes.enter_context(CudaAutocast())
        gradients = _count(stepper, counter, step_flops, [batch] * settings.passes, evaluated)
    gradient_kind = HOST if settings.shards_on_host else "gradients"
    kinds = counter.kinds | dict.fromkeys(gradients, gradient_kind)
    return {
        **_bytes(counter, kinds, paged.host_bytes),
        ("offloaded",): 0 if host is None else host.bytes,
        **{(name,): count for name, count in step_flops.totals(settings.passes).items()},
    }


@contextmanager
def _sharding(settings: TraceSettings) -> Iterator[Sharding]:
    sizes, parallel = settings.mesh_sizes, settings.run.parallel
    assert sizes is not None
    with fake_device_mesh(sizes) as mesh:
        yield Sharding(mesh, reshard=parallel.reshard, sync_each=parallel.sync == "each", offload=parallel.offload)


def _counter(settings: TraceSettings, stepper: Stepper, batches: list[Batch]) -> StorageCounter:
    """Counter that knows everything allocated before the step."""
    counter = StorageCounter("cpu", as_on_gpu=settings.on_gpu)
    kept = kept_tensors(stepper.model, stepper.optimizer)
    if settings.shards_on_host:
        counter.hold(HOST, [each for each in stepper.model.network.parameters() if is_sharded(each)])
        counter.hold(HOST, kept["optimizer_states"])
    for kind, tensors in kept.items():
        counter.hold(kind, [each for each in tensors if counter.kind_of(each) != HOST])
    inputs = [tensor for batch in batches for tensor in batch.tensors]
    if settings.on_gpu:
        counter.hold("temporary", inputs)  # a GPU has copies of them
    else:
        counter.ignore(inputs)
    return counter


def _count(
    stepper: Stepper, counter: StorageCounter, step_flops: StepFlops, batches: list[Batch], evaluated: Batch | None
) -> list[int]:
    """Run the step, a save and an evaluation; returns the serials of the gradients' storages."""
    with step_flops.mode, counter:
        result = stepper.run(batches, lr=1e-4)
    counter.enter(SAVE)
    local = (each.grad for each in stepper.model.trained().values() if each.grad is not None)
    gradients = [counter.serial_of(each) for each in local]
    if evaluated is not None:
        stepper.forget_gradients()
        counter.enter(EVALUATION)
        with counter:
            stepper.model.eval().scores(evaluated)
    del result  # a run reads its tensors after the step, so they stay allocated until here
    return [serial for serial in gradients if serial is not None]


def _bytes(counter: StorageCounter, kinds: dict[int, str], paged_bytes: int) -> Numbers:
    sizes = {serial: size for serial, size in reversed(counter.events) if size > 0}
    kept, on_host = (
        sum(sizes.get(serial, 0) for serial, kind in kinds.items() if kind in wanted)
        for wanted in (PERSISTENT_KINDS, (HOST,))
    )
    at_peaks: Numbers = {
        (phase, kind): size
        for phase, sizes_by_kind in peaks(counter.events, counter.phases, kinds).items()
        if phase != BACKWARD_BETWEEN  # never the largest phase, and missing in traces of few layers
        for kind, size in sizes_by_kind.items()
    }
    return {**at_peaks, ("kept",): kept, ("host",): paged_bytes + on_host}


def _training_model(
    settings: TraceSettings, network: nn.Module, sections: ModelSections, sharding: Sharding | None
) -> TrainingModel:
    """Wrap the network as `build_training_model` does, with fused LoRA and chunked loss where a run uses them."""
    training_model = TrainingModel(
        network, DTYPES[settings.precision].compute, settings.run.task, quantizer=sections.quantizer
    ).train()
    training_model.linear = None if training_model.pooled else linear_head(training_model.language_model)
    if settings.run.adapter.fused:
        training_model.fused = fuse(network, None, quantizer=sections.quantizer)
    if sharding is not None:
        sharding.divide(training_model, repeated_layers(training_model.language_model), ["scores"])
        training_model.divided_by(sharding)
    if settings.shape.keeps_gradients or (settings.shape.micro_batches > 1 and settings.passes == 1):
        training_model.register_forward_pre_hook(_set_gradients)
    return training_model


def _stepper(
    settings: TraceSettings, training_model: TrainingModel, sharding: Sharding | None, paged: PagedStates
) -> Stepper:
    """Build the optimizer with the states of a first step, and the reduction of its gradients."""
    run, trained = settings.run, list(training_model.trained().values())
    reduction = GradientReduction(trained)
    shards = None
    if sharding is not None:
        reduction = ShardedGradients(trained, sharding, whole_matrices=needs_whole_matrices(run.optimizer))
        shards = {each: (own, first_number(each)) for each, own in reduction.local.items()} or None
    section = replace(run.optimizer, kind=PLANNED_AS.get(run.optimizer.kind, run.optimizer.kind))
    optimizer = build_optimizer(section, training_model, run.seed, shards)
    if settings.on_gpu:  # on a CPU, paged states are in the planned memory
        paged.attach(ordinary(optimizer))
    for parameter in reduction.stepped:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    fp16 = settings.precision == "fp16"
    return Stepper(training_model, optimizer, _SINGLE_PROCESS, run.training.clip, fp16=fp16, reduction=reduction)


def _set_gradients(training_model: nn.Module, _args: Any) -> None:
    """Allocate the gradients of earlier micro-batches: of several, the last one is traced, which needs the most."""
    for parameter in training_model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)


def _batch(shape: Shape) -> Batch:
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
        weights=LossWeights(torch.ones(shape.label_rows), float(shape.label_rows)) if shape.weighted else None,
        token_type_ids=torch.zeros(shape.rows, shape.width, dtype=torch.int64) if shape.pairs else None,
    )
