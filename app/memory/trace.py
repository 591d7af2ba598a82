"""Trace of one training step and one evaluation on fake tensors: micro-batch shape, phases, storages and FLOPs."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from app.adapters.lora_inits import moment_bytes
from app.base.base_model import open_base
from app.batch import Batch, LossWeights, PackedSequences
from app.config.dataset import has_pairs
from app.config.schema import RunConfig
from app.config.tasks import TASKS
from app.data.objectives import LabeledTokens, NextToken
from app.distributed.context import ContextGroup
from app.distributed.fsdp import MeshSizes, Sharding, is_sharded
from app.distributed.process_group import HostGroup, Runtime, fake_device_mesh
from app.layers.activation_checkpointing import HostOffload, repeated_layers
from app.layers.operations import COSTS, as_on_gpu
from app.layers.recurrent import recurrent_mixers
from app.layers.tiled_mlp import gated_mlps
from app.memory.compiled_layers import Compiled
from app.memory.fake_tensors import PLANNED_AS, CudaAutocast, FakeTensorFallbacks, MetaModel, PagedStates, materialize
from app.model import losses
from app.model.build import assemble, group_experts
from app.model.losses import Loss
from app.optim.optimizers import ordinary
from app.tasks.table import IMPLEMENTATIONS, loss_of
from app.training.rows import layout_of
from app.training.setup import stepper_of
from app.training.storage_counter import Event, StorageCounter, kept_tensors
from app.training.train_step import Stepper


class _NoModuleTracker(AbstractContextManager["_NoModuleTracker"]):
    """Replaces torch's module tracker, which holds references to the whole autograd graph and its saved tensors."""

    parents = frozenset({"Global"})

    def __exit__(self, *_exception: object) -> None:
        pass


class StepFlops:
    """FLOPs of a step while `mode` is entered, and of an evaluation while `evaluation` is."""

    def __init__(self) -> None:
        packets = ((_packet(name), cost.flops) for name, cost in COSTS.items())
        mapping = {packet: formula for packet, formula in packets if packet is not None and formula is not None}
        self.mode, self.evaluation = (FlopCounterMode(display=False, custom_mapping=mapping) for _ in range(2))
        for mode in (self.mode, self.evaluation):
            mode.mod_tracker = _NoModuleTracker()  # type: ignore[assignment]
        self.in_backward = False
        self._recomputed = 0
        self._is_recomputing = False
        self._passes: int | None = None

    def count_recomputation(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the forward of a layer or MLP, to count its FLOPs during backward as recomputation."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.in_backward or self._is_recomputing:  # an MLP inside a layer counts once
                return forward(*args, **kwargs)
            before, self._is_recomputing = self.mode.get_total_flops(), True
            try:
                return forward(*args, **kwargs)
            finally:
                self._recomputed += self.mode.get_total_flops() - before
                self._is_recomputing = False

        return run

    def end_passes(self) -> None:
        """Count all later operations as the optimizer's."""
        if self._passes is None:
            self._passes = self.mode.get_total_flops()

    def totals(self, passes: int = 1) -> dict[str, int]:
        """Return the FLOPs of one micro-batch, those in fp8, those recomputed, and the FLOPs of the optimizer."""
        total = self.mode.get_total_flops()
        in_passes = total if self._passes is None else self._passes
        counts = self.mode.get_flop_counts().get("Global", {})
        in_fp8 = sum(counts.get(_packet(name), 0) for name, cost in COSTS.items() if cost.in_fp8)
        return {
            "flops": in_passes // passes,
            "fp8": in_fp8 // passes,
            "recomputed": self._recomputed // passes,
            "update": total - in_passes,
        }


def _packet(name: str) -> Any | None:
    """Return the operation with a name; None if its library is not loaded."""
    library, _, operation = name.partition("::")
    return getattr(getattr(torch.ops, library), operation, None)


# ---- phases


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

    Memory in the layers between two of these phases never exceeds the larger of the two. The second layer has a
    separate phase: the first one computes no gradient for its input and prefetches no input from the host. With
    sharding, the neighbors of first and last layers have one too: weights are all-gathered one layer ahead while
    gradients of the layer before are still being reduced.
    """
    last = plain + recomputed - 1
    if layer == last:
        return BACKWARD_LAST
    phases = {recomputed - 1: BACKWARD_LAST_RECOMPUTED, recomputed: BACKWARD_FIRST_STORED, 0: BACKWARD_FIRST}
    if recomputed > 1 or shards:
        phases = {1: BACKWARD_SECOND} | phases
    if shards:
        neighbors = {
            recomputed - 2: BACKWARD_SECOND_LAST_RECOMPUTED,
            recomputed + 1: BACKWARD_SECOND_STORED,
            last - 1: BACKWARD_SECOND_LAST,
        }
        phases = neighbors | phases
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
    """Return the bytes by kind at the peak of each phase; a phase that is entered several times counts as one.

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
    """Return the kinds of all storages: saved activations outlive forward, others are temporary or of the loss head."""
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


# ---- shape


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one micro-batch that determine the memory of a step."""

    rows: int
    width: int  # positions of each row
    documents: tuple[int, ...]  # lengths of packed documents, padding included; () if rows are padded
    places: int  # entries of cu_seqlens but one, unused ones included; 0 if rows are padded
    longest: int  # max_seqlen
    label_rows: int  # rows of hidden states that go through the head
    micro_batches: int = 1  # per step and process
    keeps_gradients: bool = False  # whether they stay allocated between steps, as in DDP's buckets
    weighted: bool = False  # whether labels have loss weights
    pairs: bool = False  # whether the model reads token_type_ids
    sharers: int = 1  # processes that each compute a slice of the row; `documents` are those of the whole row

    @property
    def tokens(self) -> int:
        """Positions of a micro-batch, padding included."""
        return self.rows * self.width

    @classmethod
    def of(cls, batch: Batch, micro_batches: int = 1) -> "Shape":
        documents = batch.documents
        rows, width = batch.ids.shape
        return cls(
            rows=rows,
            width=width,
            documents=() if documents is None else documents.lengths,
            places=0 if documents is None else len(documents.cu_seqlens) - 1,
            longest=width if documents is None else documents.max_seqlen,
            label_rows=len(batch.label_rows),
            micro_batches=micro_batches,
            weighted=batch.weights is not None,
            pairs=batch.token_type_ids is not None,
        )

    def sliced(self, sharers: int) -> "Shape":
        """Return the shape of the slice of one of `sharers` processes, all of whose tokens may be trained."""
        if sharers == 1:
            return self
        width = -(-self.width // sharers)
        padding = width * sharers - self.width
        return replace(
            self,
            width=width,
            documents=(*self.documents, padding) if padding else self.documents,
            places=self.places + bool(padding),
            label_rows=min(self.label_rows, width),
            sharers=sharers,
        )

    def of_evaluation(self, run: RunConfig) -> "Shape":
        """Return the shape of evaluation batches: equal bins, or `eval.rows` rows of equal length and label count."""
        if run.batching.packing:
            return self
        rows = run.eval.rows * TASKS[run.task.kind].documents
        return replace(
            self,
            rows=rows,
            documents=(self.width,) * rows if self.documents else (),
            places=2 * rows if self.documents else 0,
            label_rows=-(-self.label_rows * rows // self.rows),
        )


def worst_case(run: RunConfig) -> Shape:
    """Return the largest micro-batch that the settings allow, without reading data.

    It is a full bin of rows of `dataset.max_length`, or `batching.rows` of them, padded; collated as in a run.
    """
    longest, count = run.dataset.max_length, run.batching.rows
    lengths = [longest] * count * TASKS[run.task.kind].documents
    if run.batching.packing:
        full, rest = divmod(run.batching.bin_tokens, longest)
        lengths = [longest] * full + [rest] * bool(rest)
    objective = _Unlabeled(open_base(run.model, run.task).is_bidirectional, has_pairs(run.dataset))
    rows: Any = lengths  # the objective reads nothing else
    batch = layout_of(run, count, objective).batch(rows, [np.arange(len(lengths))], len(lengths), epoch=0)
    labels = IMPLEMENTATIONS[run.task.kind].most_labels(run.task, sum(lengths), len(lengths))
    shape = replace(Shape.of(batch, run.batching.accumulation), label_rows=labels)
    return shape.sliced(run.parallel.context)


@dataclass(frozen=True, slots=True)
class _Unlabeled(NextToken):
    """Objective without a tokenizer: rows are lengths, of zeros without labels."""

    pairs: bool = False

    def label(self, rows: Any, i: int, epoch: int) -> tuple[LabeledTokens, ...]:  # noqa: ARG002
        none = np.zeros(0, np.int64)
        return (LabeledTokens(np.zeros(rows[i], np.int32), none, none, second_start=0 if self.pairs else -1),)


# ---- trace


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
    begins: bool = False  # whether the adapter is initialized from the inputs of its layers
    before_ampere: bool = False  # whether the GPU runs no Triton kernels

    @property
    def passes(self) -> int:
        """Number of micro-batches to trace: with sharded gradients the second one equals all later ones."""
        return min(self.shape.micro_batches, 2) if self.mesh_sizes else 1

    @property
    def shards_on_host(self) -> bool:
        """Whether shards, their gradients and states are outside the planned memory, which on a CPU is the same."""
        return self.on_gpu and self.mesh_sizes is not None and self.run.parallel.offload


def trace(
    settings: TraceSettings, meta_model: MetaModel, plain: int, recomputed: int, compiled: Compiled | None = None
) -> Numbers:
    """Trace a model whose first `recomputed` layers are recomputed in backward, followed by `plain` layers.
    `compiled` returns the forward of a compiled layer.

    The traced step is the second one of a run: the first one creates the optimizer states.
    """
    run, network, step_flops, paged = settings.run, meta_model.network(plain + recomputed), StepFlops(), PagedStates()
    sections = replace(meta_model.sections, recompute=recomputed)
    with ExitStack() as modes:
        sharding = None
        if settings.mesh_sizes is not None:
            sharding = Sharding(modes.enter_context(fake_device_mesh(settings.mesh_sizes)), run.parallel)
        if settings.on_gpu:
            modes.enter_context(as_on_gpu(kernels=not settings.before_ampere))
        modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        modes.enter_context(FakeTensorFallbacks())  # type: ignore[no-untyped-call]
        materialize(network, sections)
        _wrap_layers(network, step_flops, compiled, tiled=sections.tile > 0, on_gpu=settings.on_gpu)
        host = HostOffload("meta" if settings.on_gpu else "cpu") if sections.offload else None
        loss = _planned_loss(run)
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
        outputs = training_model.language_model.config.num_labels
        batch = _batch(settings.shape, loss, outputs)
        evaluated = None if settings.evaluated is None else _batch(settings.evaluated, loss, outputs)
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
        ("evaluation",): step_flops.evaluation.get_total_flops(),
        **(dict(zip(MOMENTS, moment_bytes(run.adapter.init, network), strict=True)) if settings.begins else {}),
    }


def _planned_loss(run: RunConfig) -> Loss:
    """Return the loss of a run; a loss over documents needs only the memory of the two passes of the head."""
    loss = loss_of(run)
    return loss if loss.of_rows is None else losses.over_documents(lambda sums, _batch: sums)


def _wrap_layers(network: Any, step_flops: StepFlops, compiled: Compiled | None, *, tiled: bool, on_gpu: bool) -> None:
    """Set the compiled forward of layers that have one, and count the recomputation of layers and tiles."""
    layers = repeated_layers(network)
    for layer in layers:
        if compiled is not None and not recurrent_mixers(layer):
            layer.forward = compiled(layer, step_flops.count_recomputation)
    for module in [*layers, *(gated_mlps(network) if tiled else ())]:
        module.forward = step_flops.count_recomputation(module.forward)
        if on_gpu:
            module.forward = CudaAutocast.also_in_backward(module.forward)


def _counter(settings: TraceSettings, stepper: Stepper, batches: list[Batch]) -> StorageCounter:
    """Return a counter of everything allocated before the step."""
    counter = StorageCounter(as_on_gpu=settings.on_gpu)
    tensors_by_kind = kept_tensors(stepper.model, stepper.optimizer)
    if settings.shards_on_host:
        counter.hold(HOST, [parameter for parameter in stepper.model.network.parameters() if is_sharded(parameter)])
        counter.hold(HOST, tensors_by_kind["optimizer_states"])
    for kind, tensors in tensors_by_kind.items():
        counter.hold(kind, [tensor for tensor in tensors if counter.kind_of(tensor) != HOST])
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
    """Run the step, a save, an evaluation and a pass before the first step; return the storage serials of gradients."""
    with step_flops.mode, counter:
        result = stepper.run(batches, lr=1e-4)
    counter.enter(SAVE)
    weights = stepper.model.trained().values()
    gradients = [counter.serial_of(weight.grad) for weight in weights if weight.grad is not None]
    if evaluated is not None:
        stepper.forget_gradients()
        counter.enter(EVALUATION)
        with step_flops.evaluation, counter:
            stepper.model.eval().scores(evaluated)
    if begins:
        stepper.forget_gradients()
        stepper.model.use_linear_head(None)  # it is compared later
        counter.enter(BEGIN)
        with counter:
            stepper.model.eval().scores(batches[0])
    del result  # a run reads its tensors after the step, so they stay allocated until here
    return [serial for serial in gradients if serial is not None]


def _bytes(counter: StorageCounter, kinds: dict[int, str], paged_bytes: int) -> Numbers:
    sizes = {serial: size for serial, size in reversed(counter.events) if size > 0}
    persistent, on_host = (
        sum(sizes.get(serial, 0) for serial, kind in kinds.items() if kind in counted)
        for counted in (PERSISTENT_KINDS, (HOST,))
    )
    at_peaks: Numbers = {
        (phase, kind): size
        for phase, sizes_by_kind in peaks(counter.events, counter.phases, kinds).items()
        if phase != BACKWARD_BETWEEN  # never the largest phase, and missing in traces of few layers
        for kind, size in sizes_by_kind.items()
        if phase != BEGIN or kind not in ("gradients", "optimizer_states")  # there are none yet
    }
    return {**at_peaks, ("kept",): persistent, ("host",): paged_bytes + on_host}


def _set_gradients(training_model: nn.Module, _args: Any) -> None:
    """Allocate the gradients of earlier micro-batches: the last micro-batch is traced, which needs the most memory."""
    for parameter in training_model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)


def _batch(shape: Shape, loss: Loss, outputs: int) -> Batch:
    documents = None
    if shape.documents:
        bounds = torch.zeros(shape.places + 1, dtype=torch.int32)
        exchange = ContextGroup(index=0, size=shape.sharers) if shape.sharers > 1 else None
        documents = PackedSequences(shape.documents, bounds, shape.longest, exchange)
    return Batch(
        ids=torch.zeros(shape.rows, shape.width, dtype=torch.int64),
        positions=torch.zeros(shape.rows, shape.width, dtype=torch.int64),
        label_rows=torch.zeros(shape.label_rows, dtype=torch.int64),
        targets=loss.blank_targets(shape.label_rows, outputs),
        lengths=shape.documents or (shape.width,) * shape.rows,
        num_labels=shape.label_rows,
        num_tokens=shape.tokens,
        documents=documents,
        weights=LossWeights(torch.ones(shape.label_rows), float(shape.label_rows)) if shape.weighted else None,
        token_type_ids=torch.zeros(shape.rows, shape.width, dtype=torch.int64) if shape.pairs else None,
        document_of_label=torch.zeros(shape.label_rows, dtype=torch.int64) if loss.of_rows is not None else None,
    )
