"""Estimated memory and FLOPs of a step, and whether they fit a machine.

The peak of each phase is affine in the number of layers that store their activations and in the number of recomputed
layers, or, if layers differ, in the number of their periods: in Qwen 3.5 one layer of full attention and three others.
Each phase is extrapolated separately, and the peak of the step is the largest phase. Models with no recomputed layer,
or with recomputed layers only, have other phases, so they are extrapolated from separate traces.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from app.adapters.lora_inits import MAX_MOMENT_BYTES, OF_INPUTS
from app.base.base_model import open_base
from app.config.commands import AMPERE, HardwareConfig, all_hardware
from app.config.kinds import OWN, QUANTIZATION_KINDS
from app.config.schema import RunConfig
from app.distributed.fsdp import MeshSizes
from app.layers.attention import register, register_kernel
from app.memory import fake_tensors
from app.memory.compiled_layers import graphs_of
from app.memory.fake_tensors import MetaModel, local_capability, local_workspace_bytes, workspace_bytes
from app.memory.trace import BEGIN, MEMORY_KINDS, MOMENTS, PHASES, Numbers, Shape, TraceSettings, trace
from app.training.auto_settings import Choices, choose_precision, memory_budget, recomputed_layers, sections_of
from app.training.gpu_usage import taken_by_others
from app.training.memory import host_bytes
from app.training.torch_environment import has_expandable_segments

_EDGE_LAYERS = 2  # the first and the last layer that keep their activations have separate phases
_RECOMPUTED_EDGE_LAYERS = 3  # and the second layer, if it is recomputed
_SHARDED_EDGE_LAYERS = 4  # and all neighbors, because FSDP prefetches weights one layer ahead


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes as `torch.cuda.max_memory_allocated` would count them; without allocator and driver overhead."""

    phases: dict[str, int]  # peak of each phase, in order of execution
    peak_bytes: int
    peak_where: str  # name of the phase with the peak
    anatomy: dict[str, int]  # bytes at the peak by MEMORY_KINDS; their sum is `peak_bytes`
    largest: dict[str, int]  # bytes of each kind in the phase with most of that kind
    kept_bytes: int  # weights, gradients and optimizer states
    host_bytes: int  # shards and optimizer states in host memory
    flops_per_token: float  # without recomputation and optimizer, per position of the micro-batch
    forward_flops: float  # of `flops_per_token`, as in an evaluation; 0 if none is planned
    recomputed_flops: float  # per position of the micro-batch
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

    @property
    def passes(self) -> float:
        """Number of times that a micro-batch reads all weights: forward, backward, and the recomputed share."""
        return 2 + self.recomputed_flops / self.forward_flops


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
        before_ampere: bool = False,
    ) -> None:
        """`device`: gpu or cpu. `steps_only` plans no evaluation. `mesh_sizes` is None for an unsharded model."""
        evaluated = None if steps_only else shape.of_evaluation(run)
        on_gpu = device == "gpu"
        compiles = run.compile.partitions
        name = register(choices.attention, torch.device("cpu") if compiles else None)
        if on_gpu and choices.attention != OWN:
            name = register_kernel(
                partial(fake_tensors.attention, choices.attention, not before_ampere), fake_tensors.ATTENTION
            )
        begins = run.adapter.init in OF_INPUTS and not steps_only and mesh_sizes is None
        self._settings = TraceSettings(run, shape, evaluated, on_gpu, mesh_sizes, begins, before_ampere)
        self._meta_model = MetaModel(sections_of(run, choices), name)
        place = (name, on_gpu, mesh_sizes, shape.rows, shape.width, shape.documents, shape.places, shape.longest)
        self._graphs = graphs_of(repr((self._meta_model.sections, place))) if compiles else None
        self._traces: dict[tuple[int, int, float], Numbers] = {}
        self.layers = self._meta_model.depth
        self.has_equal_layers = self._meta_model.has_equal_layers

    def planned(self, recompute: bool | int, budget: float | None = None, *, exact: bool = False) -> MemoryPlan:
        """Return the plan of the whole model. `budget`: memory budget of compiled layers, by default that of the run.

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
        return _plan(self._settings, total, exact=exact, traced_layers=self.layers if exact else sum(base) + period)

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
    """Return the fewest layers to trace: edges and a whole period, ending at the same position in it as all layers."""
    fewest = max(edges, period)
    return min(layers, fewest + (layers - fewest) % period)


def _plan(
    settings: TraceSettings, numbers: Mapping[tuple[str, ...], int], *, exact: bool, traced_layers: int
) -> MemoryPlan:
    shape, evaluated = settings.shape, settings.evaluated
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
        forward_flops=0.0 if evaluated is None else numbers["evaluation",] / evaluated.tokens,
        recomputed_flops=numbers["recomputed",] / shape.tokens,
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

    Workspaces are those of the GPU of this process; without one, the plan has none.
    """
    choices = choices or planned_choices(run, device)
    older = device == "gpu" and torch.cuda.is_available() and torch.cuda.get_device_capability() < AMPERE
    options: dict[str, Any] = {"steps_only": steps_only, "mesh_sizes": mesh_sizes, "before_ampere": older}
    estimate = Estimate(run, shape, device, choices, **options)
    plan = estimate.planned(recomputed_layers(run.training), exact=exact)
    return plan.with_workspaces(local_workspace_bytes() if device == "gpu" else 0)


def planned_choices(run: RunConfig, device: str, *, before_ampere: bool = False) -> Choices:
    """Return precision and attention backend of a planned run, on a GPU without flash-attn."""
    half, backend = ("fp16", "sdpa") if before_ampere else ("bf16", "varlen")
    precision, attention = run.precision.kind, run.attention.kind
    if attention == OWN or open_base(run.model, run.task).tier.name == OWN:
        return Choices(half if (precision, device) == ("auto", "gpu") else choose_precision(run.precision), OWN)
    if device == "gpu":
        return Choices(half if precision == "auto" else precision, backend if attention == "auto" else attention)
    return Choices(choose_precision(run.precision), "sdpa")


# ---- fit


_GIB = 1 << 30
# CUDA context and loaded kernels, for GPUs without a measurement
ASSUMED_CONTEXT_BYTES = 784 << 20
_MARGIN_SHARE = 0.03  # of the memory of the machine, for other processes and kernels that are loaded late
# Fragmentation in torch's CUDA caching allocator as a share of live bytes. On an H200 with expandable segments at most
# 2.2 % in steps of 8B, compiled or not; without them simulated, at most 11.4 %.
_SHARE = 0.025
_SHARE_WITHOUT_EXPANDABLE_SEGMENTS = 0.12

_UNPACK_BYTES_PER_WEIGHT = 2.5  # extra memory traffic of a 4-bit weight that is dequantized to bf16
_PCIE_BYTES_PER_SECOND = 50e9  # PCIe 5 with pinned memory


@dataclass(frozen=True, slots=True)
class Hardware:
    """Memory and rates of a GPU or CPU. Unknown rates are None. `context_bytes`: memory before the first tensor."""

    name: str
    label: str
    device: str  # gpu or cpu
    memory_bytes: int
    context_bytes: int
    context_is_measured: bool
    flops_per_second: float | None = None  # in bf16 and fp16
    bytes_per_second: float | None = None
    fp8_flops_per_second: float | None = None
    workspace_bytes: int = 0  # of cuBLAS, in torch's allocator
    tf32_flops_per_second: float | None = None
    fp32_flops_per_second: float | None = None
    before_ampere: bool = False  # an NVIDIA GPU without bf16, FlashAttention and Triton kernels
    shares_host: bool = False  # the memory is that of the CPU

    def rate(self, precision: str) -> float | None:
        """Return the peak FLOPs per second of a precision."""
        rates = {"tf32": self.tf32_flops_per_second, "fp32": self.fp32_flops_per_second}
        return rates.get(precision, self.flops_per_second)


def machine_of(hardware: HardwareConfig | None) -> Hardware:
    """Return the facts of the `hardware` group; without one, of the GPU of this host, or of its CPU."""
    if hardware is not None:
        return _table_machine(hardware, round(hardware.memory_gib * _GIB))
    import torch

    if not torch.cuda.is_available():
        # of this process, which has loaded the same libraries as a run
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
        context_bytes = resident_pages * os.sysconf("SC_PAGE_SIZE")
        return Hardware("cpu", "this machine", "cpu", host_bytes(), context_bytes, True)
    name, memory = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
    entry = hardware_named(name)
    machine = (
        Hardware(
            *(name, name, "gpu", memory, ASSUMED_CONTEXT_BYTES, False),
            workspace_bytes=workspace_bytes(local_capability()),
            before_ampere=torch.cuda.get_device_capability() < AMPERE,
        )
        if entry is None
        else _table_machine(entry, memory)
    )
    in_use = taken_by_others()
    if in_use is None:
        return machine
    others = f", {in_use.bytes / 1e9:.1f} GB of it used by other processes" if in_use.bytes >= _GIB else ""
    # where torch counts less memory than the driver, the rest is not available
    free = min(memory, in_use.total - in_use.bytes)
    return replace(machine, label=machine.label + others, memory_bytes=free)


def hardware_named(name: str) -> HardwareConfig | None:
    """Return the entry of the `hardware` group for the GPU name of the driver."""
    return next((hardware for hardware in all_hardware() if name in hardware.names), None)


def _table_machine(hardware: HardwareConfig, memory: int) -> Hardware:
    context = hardware.context_gib
    return Hardware(
        name=hardware.name,
        label=hardware.label,
        device="gpu",
        memory_bytes=memory,
        context_bytes=ASSUMED_CONTEXT_BYTES if context is None else round(context * _GIB),
        context_is_measured=context is not None,
        flops_per_second=_per_second(hardware.bf16_tflops or hardware.fp16_tflops),
        bytes_per_second=hardware.bandwidth_gb * 1e9,
        fp8_flops_per_second=_per_second(hardware.fp8_tflops),
        workspace_bytes=workspace_bytes(hardware.capability),
        tf32_flops_per_second=_per_second(hardware.tf32_tflops),
        fp32_flops_per_second=_per_second(hardware.fp32_tflops),
        before_ampere=hardware.before_ampere,
        shares_host=hardware.shares_host,
    )


def _per_second(tflops: float | None) -> float | None:
    return None if tflops is None else tflops * 1e12


@dataclass(frozen=True, slots=True)
class Verdict:
    """Memory that one process needs and has. `needed_bytes` is the sum of the first four fields and `shared_bytes`."""

    peak_bytes: int  # live tensors
    lost_bytes: int  # assumed fragmentation in the allocator
    context_bytes: int
    margin_bytes: int
    memory_bytes: int
    kept_bytes: int = 0  # weights, gradients and optimizer states
    shared_bytes: int = 0  # offloaded and paged tensors, where the GPU shares the memory of the CPU

    @property
    def reserved_bytes(self) -> int:
        """Memory that torch reserves."""
        return self.peak_bytes + self.lost_bytes

    @property
    def needed_bytes(self) -> int:
        return self.reserved_bytes + self.context_bytes + self.margin_bytes + self.shared_bytes

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.memory_bytes

    @property
    def is_hopeless(self) -> bool:
        """Whether weights, gradients and states alone do not fit, so that smaller micro-batches do not help."""
        return self.kept_bytes + self.context_bytes + self.margin_bytes + self.shared_bytes > self.memory_bytes


def check_fit(plan: MemoryPlan, machine: Hardware) -> Verdict:
    """Compare a plan with the memory of a machine."""
    return Verdict(
        peak_bytes=plan.peak_bytes,
        lost_bytes=round(_allocator_share(machine) * plan.peak_bytes),
        context_bytes=machine.context_bytes,
        margin_bytes=round(_MARGIN_SHARE * machine.memory_bytes),
        memory_bytes=machine.memory_bytes,
        kept_bytes=plan.kept_bytes,
        shared_bytes=plan.host_bytes + plan.offloaded_bytes if machine.shares_host else 0,
    )


def _allocator_share(machine: Hardware) -> float:
    """Return the share of live bytes lost to fragmentation; a CPU has no caching allocator."""
    if machine.device == "cpu":
        return 0.0
    return _SHARE if has_expandable_segments() else _SHARE_WITHOUT_EXPANDABLE_SEGMENTS


def time_bound(plan: MemoryPlan, shape: Shape, machine: Hardware, precision: str) -> dict[str, float] | None:
    """Return the least time of a step: its FLOPs at the peak rate of the machine; None if the rate is unknown."""
    if machine.rate(precision) is None or not plan.flops:
        return None
    seconds = _compute_seconds(plan, machine, precision)
    return {"step_seconds": seconds, "tokens_per_second": shape.tokens * shape.micro_batches / seconds}


def seconds_per_token(run: RunConfig, plan: MemoryPlan, tokens: int, machine: Hardware) -> float:
    """Return the relative time of a token: compute, dequantization if the bandwidth is known, and copies to the host.

    Meaningful only in comparison with other settings on the same machine.
    """
    seconds = _compute_seconds(plan, machine, run.precision.kind) / run.batching.accumulation
    seconds += dequantization_seconds(run, plan, machine) + 2 * plan.offloaded_bytes / _PCIE_BYTES_PER_SECOND
    return seconds / tokens


def dequantization_seconds(run: RunConfig, plan: MemoryPlan, machine: Hardware) -> float:
    """Return the time to dequantize the weights for a micro-batch; 0 if the bandwidth is unknown."""
    if not machine.bytes_per_second:
        return 0.0
    return plan.passes * quantized_weights(run, plan) * _UNPACK_BYTES_PER_WEIGHT / machine.bytes_per_second


def quantized_weights(run: RunConfig, plan: MemoryPlan) -> float:
    """Return the number of weights that are dequantized on each use."""
    base = run.quantization
    per_byte = QUANTIZATION_KINDS[base.kind].weights_per_scale_byte[base.double_quant]
    return plan.anatomy["quantization_constants"] * per_byte


def _compute_seconds(plan: MemoryPlan, machine: Hardware, precision: str) -> float:
    """Return the time of the FLOPs of a step, at 1 FLOP per second if the rate of the machine is unknown."""
    rate = machine.rate(precision) or 1.0
    in_fp8 = plan.fp8_flops / (machine.fp8_flops_per_second or rate)
    return (plan.flops - plan.fp8_flops) / rate + in_fp8
