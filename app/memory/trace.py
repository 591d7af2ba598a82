"""Trace of one training step and one evaluation on fake tensors, with every storage and FLOP counted."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from app.adapters.lora_inits import moment_bytes
from app.batch import Batch, LossWeights, PackedSequences
from app.config.schema import RunConfig
from app.distributed.fake_process_group import fake_device_mesh
from app.distributed.fsdp import MeshSizes, Sharding, is_sharded
from app.distributed.process_group import HostGroup, Runtime
from app.layers.activation_checkpointing import HostOffload, repeated_layers
from app.layers.kernels import as_on_gpu
from app.layers.recurrent import recurrent_mixers
from app.memory.compiled_layers import Compiled
from app.memory.cuda_ops import CudaAutocast, PagedStates
from app.memory.fake_tensors import PLANNED_AS, FakeTensorFallbacks, materialise
from app.memory.flops import StepFlops
from app.memory.meta_model import MetaModel
from app.memory.phases import BACKWARD_BETWEEN, BEGIN, EVALUATION, HOST, PERSISTENT_KINDS, SAVE, peaks, register_phases
from app.memory.shape import Shape
from app.model import losses
from app.model.build import assemble, group_experts
from app.optim.stochastic_rounding import ordinary
from app.tasks.table import loss_of
from app.training.setup import stepper_of
from app.training.storage_counter import StorageCounter, kept_tensors
from app.training.train_step import Stepper

_SINGLE_PROCESS = Runtime(
    accelerator=None, device=torch.device("cpu"), host_group=HostGroup(rank=0, count=1), threads=1
)

# Totals by name, and bytes at the peak of each phase by phase and kind
Numbers = dict[tuple[str, ...], int]
MOMENTS = (("moments",), ("left to the next group",), ("decomposition",))


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Settings of a trace, except the number of layers."""

    run: RunConfig
    shape: Shape
    evaluated: Shape | None  # None: no evaluation is traced
    on_gpu: bool
    mesh_sizes: MeshSizes | None = None  # None: the model is not sharded
    begins: bool = False  # whether the adapter begins with the inputs of its layers

    @property
    def passes(self) -> int:
        """Micro-batches to trace: with sharded gradients the second one equals all later ones."""
        return min(self.shape.micro_batches, 2) if self.mesh_sizes else 1

    @property
    def shards_on_host(self) -> bool:
        """Whether shards, their gradients and states are outside the planned memory; on a CPU both are the same."""
        return self.on_gpu and self.mesh_sizes is not None and self.run.parallel.offload


def trace(
    settings: TraceSettings, meta_model: MetaModel, plain: int, recomputed: int, compiled: Compiled | None = None
) -> Numbers:
    """Trace a model whose first `recomputed` layers are recomputed in backward, followed by `plain` layers.
    `compiled` gives the forward of a compiled layer.

    The traced step is the second one of a run: the first one creates the optimizer states.
    """
    run, network, step_flops, paged = settings.run, meta_model.network(plain + recomputed), StepFlops(), PagedStates()
    sections = replace(meta_model.sections, recompute=recomputed)
    with ExitStack() as modes:
        sharding = None
        if settings.mesh_sizes is not None:
            sharding = Sharding(modes.enter_context(fake_device_mesh(settings.mesh_sizes)), run.parallel)
        if settings.on_gpu:
            modes.enter_context(as_on_gpu())
        modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        modes.enter_context(FakeTensorFallbacks())  # type: ignore[no-untyped-call]
        materialise(network, sections)
        _wrap_layers(network, step_flops, compiled, on_gpu=settings.on_gpu)
        host = HostOffload("meta" if settings.on_gpu else "cpu") if sections.offload else None
        loss = loss_of(run)
        over_documents = loss.of_rows is not None
        if over_documents:  # any function of a number per document: its memory is nothing next to the head's two passes
            loss = losses.over_documents(lambda sums, _batch: sums)
        training_model = assemble(network, sections, loss, None, host)
        if sharding is not None:
            training_model.divide(sharding)
        group_experts(training_model, sections, None)
        if settings.shape.keeps_gradients or (settings.shape.micro_batches > 1 and settings.passes == 1):
            training_model.register_forward_pre_hook(_set_gradients)
        kind = PLANNED_AS.get(run.optimizer.kind, run.optimizer.kind)
        planned = replace(run, optimizer=replace(run.optimizer, kind=kind))
        stepper = stepper_of(training_model, planned, _SINGLE_PROCESS, sections.precision)
        if settings.on_gpu:  # on a CPU, paged states are in the planned memory
            paged.attach(ordinary(stepper.optimizer))
        stepper.allocate_states()
        blank = partial(loss.blank_targets, outputs=training_model.language_model.config.num_labels)

        def batch_of(shape: Shape) -> Batch:
            return _batch(shape, blank(shape.label_rows), over_documents=over_documents)

        batch = batch_of(settings.shape)
        evaluated = None if settings.evaluated is None else batch_of(settings.evaluated)
        counter = _counter(settings, stepper, [batch, *([evaluated] if evaluated else [])])
        register_phases(stepper, counter, step_flops, recomputed)
        if settings.on_gpu:
            modes.enter_context(CudaAutocast())
        gradients = _count(stepper, counter, step_flops, [batch] * settings.passes, evaluated, begins=settings.begins)
    kinds = counter.kinds | dict.fromkeys(gradients, HOST if settings.shards_on_host else "gradients")
    return {
        **_bytes(counter, kinds, paged.host_bytes),
        ("offloaded",): 0 if host is None else host.bytes,
        **{(name,): count for name, count in step_flops.totals(settings.passes).items()},
        **(dict(zip(MOMENTS, moment_bytes(run.adapter.init, network), strict=True)) if settings.begins else {}),
    }


def _wrap_layers(network: Any, step_flops: StepFlops, compiled: Compiled | None, *, on_gpu: bool) -> None:
    """Give layers their compiled forward, where they have one, and count what they recompute."""
    for layer in repeated_layers(network):
        if compiled is not None and not recurrent_mixers(layer):
            layer.forward = compiled(layer, step_flops.count_recomputation)
        layer.forward = step_flops.count_recomputation(layer.forward)
        if on_gpu:
            layer.forward = CudaAutocast.also_in_backward(layer.forward)


def _counter(settings: TraceSettings, stepper: Stepper, batches: list[Batch]) -> StorageCounter:
    """Counter that knows everything allocated before the step."""
    counter = StorageCounter(as_on_gpu=settings.on_gpu)
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
    stepper: Stepper,
    counter: StorageCounter,
    step_flops: StepFlops,
    batches: list[Batch],
    evaluated: Batch | None,
    *,
    begins: bool,
) -> list[int]:
    """Run the step, a save, an evaluation and a pass before the first step; returns the serials of the gradients'
    storages.
    """
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
    if begins:
        stepper.forget_gradients()
        stepper.model.use_linear_head(None)  # which is compared later
        counter.enter(BEGIN)
        with counter:
            stepper.model.eval().scores(batches[0])
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
        if phase != BEGIN or kind not in ("gradients", "optimizer_states")  # there are none yet
    }
    return {**at_peaks, ("kept",): kept, ("host",): paged_bytes + on_host}


def _set_gradients(training_model: nn.Module, _args: Any) -> None:
    """Allocate the gradients of earlier micro-batches: of several, the last one is traced, which needs the most."""
    for parameter in training_model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)


def _batch(shape: Shape, targets: torch.Tensor, *, over_documents: bool) -> Batch:
    documents = None
    if shape.documents:
        bounds = torch.zeros(shape.places + 1, dtype=torch.int32)
        documents = PackedSequences(shape.documents, bounds, shape.longest)
    return Batch(
        ids=torch.zeros(shape.rows, shape.width, dtype=torch.int64),
        positions=torch.zeros(shape.rows, shape.width, dtype=torch.int64),
        label_rows=torch.zeros(shape.label_rows, dtype=torch.int64),
        targets=targets,
        lengths=shape.documents or (shape.width,) * shape.rows,
        num_labels=shape.label_rows,
        num_tokens=shape.tokens,
        documents=documents,
        weights=LossWeights(torch.ones(shape.label_rows), float(shape.label_rows)) if shape.weighted else None,
        token_type_ids=torch.zeros(shape.rows, shape.width, dtype=torch.int64) if shape.pairs else None,
        document_of_label=torch.zeros(shape.label_rows, dtype=torch.int64) if over_documents else None,
    )
