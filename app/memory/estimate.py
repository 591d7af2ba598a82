"""Memory and FLOPs of one step, extrapolated to the depth of a model from traces of a few layers.

The peak of each phase is affine in the number of layers that store their activations and in the number of recomputed
layers, of layers that differ in the number of their periods: of Qwen 3.5 one layer of full attention and three others.
Each phase is extrapolated by itself, and the peak of the step is the largest phase. Models with no recomputed layer, or
with recomputed layers only, have other phases, so they are extrapolated from traces of their own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from app.adapters.lora_inits import MAX_MOMENT_BYTES, OF_INPUTS
from app.base.structure import open_base
from app.config.model_kinds import OWN
from app.config.schema import RunConfig
from app.distributed.fsdp import MeshSizes
from app.layers.attention import register, register_kernel
from app.memory import cuda_ops
from app.memory.compiled_layers import graphs_of
from app.memory.cublas import local_workspace_bytes
from app.memory.meta_model import MetaModel
from app.memory.phases import BEGIN, MEMORY_KINDS, PHASES
from app.memory.shape import Shape
from app.memory.trace import MOMENTS, Numbers, TraceSettings, trace
from app.training.choices import Choices, choose_precision, memory_budget, recomputed_layers, sections_of

_EDGE_LAYERS = 2  # the first and the last layer that keep their activations have phases of their own
_RECOMPUTED_EDGE_LAYERS = 3  # and the second layer, if it is recomputed
_SHARDED_EDGE_LAYERS = 4  # and all neighbors, because FSDP prefetches weights one layer ahead


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes as `torch.cuda.max_memory_allocated` would count them; without allocator and driver overhead."""

    phases: dict[str, int]  # peak of each phase, in order of execution
    peak_bytes: int
    peak_where: str  # name of the phase with the peak
    anatomy: dict[str, int]  # bytes at the peak by MEMORY_KINDS; their sum is `peak_bytes`
    largest: dict[str, int]  # bytes of each kind in the phase that has most of it
    kept_bytes: int  # weights, gradients and optimizer states
    host_bytes: int  # shards and optimizer states in host memory
    flops_per_token: float  # without recomputation and optimizer, per position of the micro-batch
    flops: float  # of a whole step: all micro-batches, recomputation, optimizer
    fp8_flops: float  # those of `flops` that run in fp8
    exact: bool  # whether every layer was traced
    traced_layers: int  # layers of the largest trace
    offloaded_bytes: int = 0  # layer inputs of a micro-batch in host memory

    def with_workspaces(self, size: int) -> "MemoryPlan":
        """Return the plan with `size` bytes of cuBLAS workspaces in every phase."""
        return replace(
            self,
            phases={phase: peak + size for phase, peak in self.phases.items()},
            peak_bytes=self.peak_bytes + size,
            anatomy=self.anatomy | {"workspaces": size},
            largest=self.largest | {"workspaces": size},
        )


class Estimate:
    """Plans of one step for different numbers of recomputed layers; traces are cached."""

    def __init__(
        self,
        run: RunConfig,
        shape: Shape,
        device: str,
        choices: Choices,
        *,
        steps_only: bool = False,
        mesh_sizes: MeshSizes | None = None,
    ) -> None:
        """`device`: gpu or cpu. `steps_only` plans no evaluation. `mesh_sizes` is None for an unsharded model."""
        evaluated = None if steps_only else shape.of_evaluation(run)
        on_gpu = device == "gpu"
        compiles = run.compile.partitions
        name = register(choices.attention, torch.device("cpu") if compiles else None)
        if on_gpu and choices.attention != OWN:
            name = register_kernel(partial(cuda_ops.attention, choices.attention), cuda_ops.ATTENTION)
        begins = run.adapter.init in OF_INPUTS and not steps_only and mesh_sizes is None
        self._settings = TraceSettings(run, shape, evaluated, on_gpu, mesh_sizes, begins)
        self._meta_model = MetaModel(sections_of(run, choices), name)
        place = (name, on_gpu, mesh_sizes, shape.rows, shape.width, shape.documents, shape.places, shape.longest)
        self._graphs = graphs_of(repr((self._meta_model.sections, place))) if compiles else None
        self._traces: dict[tuple[int, int, float], Numbers] = {}
        self.layers = self._meta_model.depth
        self.has_equal_layers = self._meta_model.has_equal_layers

    def planned(self, recompute: bool | int, budget: float | None = None, *, exact: bool = False) -> MemoryPlan:
        """Plan of the whole model; `budget`: the memory budget of compiled layers, by default that of the run.

        All layers are traced if `exact`, or if they are few or differ without a pattern.
        """
        recomputed = self.layers if recompute is True else int(recompute)
        plain = self.layers - recomputed
        if self._settings.mesh_sizes is None:
            edges, recomputed_edges = _EDGE_LAYERS, _RECOMPUTED_EDGE_LAYERS
        else:  # with offloaded inputs, the second layer is the last to prefetch one
            edges = _SHARDED_EDGE_LAYERS
            recomputed_edges = edges + self._settings.run.training.offload
        period = self._meta_model.period
        base = _fewest(plain, edges, period), _fewest(recomputed, recomputed_edges, period)
        exact = exact or sum(base) + period >= self.layers
        whole = plain, recomputed
        numbers = partial(self._numbers, budget=memory_budget(self._settings.run.compile) if budget is None else budget)
        total = numbers(*whole) if exact else self._extrapolated(base, whole, numbers)
        return _plan(
            self._settings.shape, total, exact=exact, traced_layers=self.layers if exact else sum(base) + period
        )

    def _extrapolated(
        self, base: tuple[int, int], whole: tuple[int, int], numbers: Callable[[int, int], Numbers]
    ) -> Numbers:
        few, period = numbers(*base), self._meta_model.period
        total = dict(few)
        for kind, period_more in enumerate(((base[0] + period, base[1]), (base[0], base[1] + period))):
            further = (whole[kind] - base[kind]) // period
            if further:
                more = numbers(*period_more)
                for name in {**few, **more}:
                    added = more.get(name, 0) - few.get(name, 0)
                    total[name] = total.get(name, 0) + further * added
        return total

    def _numbers(self, plain: int, recomputed: int, budget: float) -> Numbers:
        key = plain, recomputed, budget
        if key not in self._traces:
            compiled = None if self._graphs is None else partial(self._graphs.compiled, budget)
            self._traces[key] = trace(self._settings, self._meta_model, plain, recomputed, compiled)
        return self._traces[key]


def _fewest(layers: int, edges: int, period: int) -> int:
    """The fewest of so many layers to trace: edges and a whole period, which end where all the layers end in theirs."""
    fewest = max(edges, period)
    return min(layers, fewest + (layers - fewest) % period)


def _plan(shape: Shape, numbers: Mapping[tuple[str, ...], int], *, exact: bool, traced_layers: int) -> MemoryPlan:
    anatomies = {
        phase: {kind: numbers.get((phase, kind), 0) for kind in MEMORY_KINDS}
        for phase in PHASES
        if any(name[0] == phase for name in numbers)
    }
    if BEGIN in anatomies:
        (total, left, decomposition), begin = (numbers[name] for name in MOMENTS), anatomies[BEGIN]
        moments = min(total, max(MAX_MOMENT_BYTES, left) + left)
        begin["temporary"] = moments + max(decomposition, begin["temporary"])
    phases = {phase: sum(sizes.values()) for phase, sizes in anatomies.items()}
    where = max(phases, key=phases.__getitem__)
    return MemoryPlan(
        phases=phases,
        peak_bytes=phases[where],
        peak_where=where,
        anatomy=anatomies[where],
        largest={kind: max(sizes[kind] for sizes in anatomies.values()) for kind in MEMORY_KINDS},
        kept_bytes=numbers["kept",],
        host_bytes=numbers["host",],
        offloaded_bytes=numbers["offloaded",],
        flops_per_token=(numbers["flops",] - numbers["recomputed",]) / shape.tokens,
        flops=float(numbers["flops",] * shape.micro_batches + numbers["update",]),
        fp8_flops=float(numbers["fp8",] * shape.micro_batches),
        exact=exact,
        traced_layers=traced_layers,
    )


def plan_memory(
    run: RunConfig,
    shape: Shape,
    device: str = "gpu",
    *,
    exact: bool = False,
    choices: Choices | None = None,
    steps_only: bool = False,
    mesh_sizes: MeshSizes | None = None,
) -> MemoryPlan:
    """Plan the memory of one process. `device`: gpu or cpu. `exact` traces every layer.

    Workspaces are those of the GPU of this process: a GPU that is not here has none in the plan.
    """
    choices = choices or planned_choices(run, device)
    estimate = Estimate(run, shape, device, choices, steps_only=steps_only, mesh_sizes=mesh_sizes)
    plan = estimate.planned(recomputed_layers(run.training), exact=exact)
    return plan.with_workspaces(local_workspace_bytes() if device == "gpu" else 0)


def planned_choices(run: RunConfig, device: str) -> Choices:
    """Precision and attention backend of a planned run; a GPU is assumed to support bf16 and to lack flash-attn."""
    precision, attention = run.precision.kind, run.attention.kind
    if attention == OWN or open_base(run.model, run.task).tier.name == OWN:
        return Choices("bf16" if (precision, device) == ("auto", "gpu") else choose_precision(run.precision), OWN)
    if device == "gpu":
        return Choices("bf16" if precision == "auto" else precision, "varlen" if attention == "auto" else attention)
    return Choices(choose_precision(run.precision), "sdpa")
