"""Whether a plan fits a machine: what lives at the peak and what is needed on top of it; and how fast a run can be."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from app.config.hardware import HardwareConfig, all_hardware
from app.config.schema import RunConfig
from app.memory.estimate import MemoryPlan
from app.memory.shape import Shape
from app.training.gpu_in_use import taken_by_others
from app.training.torch_environment import has_expandable_segments

_GIB = 1 << 30
# CUDA's context, the kernels that are loaded, cuBLAS' workspaces; taken for a GPU of which it was not measured
ASSUMED_CONTEXT = 800 << 20
_LITTLE = 1 << 30
_CGROUP = Path("/sys/fs/cgroup/memory.max")
_MARGIN = 0.03  # of the memory of the machine, for what no plan knows: other processes, kernels that are loaded late
# What torch's allocator takes beyond what lives, as a share of it, by whether its segments are expandable. Not measured
# on a GPU: in a simulation of it on 14 traces of 16 to 80 layers, of all recipes, the largest were 3.3 % and 11.4 %.
ALLOCATOR_SHARE = {True: 0.04, False: 0.12}

_UNPACKED = 2.5  # bytes moved to unpack a 4-bit weight into bf16, beyond what computing with bf16 ones moves
_PCIE_BYTES_PER_SECOND = 50e9  # of version 5 with pinned memory
_FORWARD_SHARE = 0.25  # of the arithmetic, at least
_RATED = ("bf16", "fp16", "auto")  # precisions of which the table has the rate


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates are None where they are not known. `context_bytes`: what a process needs before its first tensor."""

    name: str
    label: str
    device: str  # gpu or cpu
    memory_bytes: int
    context_bytes: int
    context_is_measured: bool
    flops_per_second: float | None = None
    bytes_per_second: float | None = None
    fp8_flops_per_second: float | None = None

    def without(self, taken: int) -> "Machine":
        """What others leave of it; a little that they hold goes without saying."""
        label = self.label if taken < _LITTLE else f"{self.label}, of which others hold {taken / 1e9:.1f} GB"
        return replace(self, label=label, memory_bytes=self.memory_bytes - taken)

    def shared_by(self, processes: int) -> "Machine":
        """For one of so many here: each has a GPU of its own, but a processor's memory is one."""
        return self if self.device == "gpu" else replace(self, memory_bytes=self.memory_bytes // processes)


def machine_of(hardware: HardwareConfig | None) -> Machine:
    """The GPU that was named; without one, the one of this machine, or its processor."""
    if hardware is not None:
        return _of_table(hardware, round(hardware.memory_gib * _GIB))
    import torch

    if not torch.cuda.is_available():
        return Machine("cpu", "the processor of this machine", "cpu", _host_memory(), _resident(), True)
    name, memory = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
    known = known_as(name, all_hardware())
    found = (
        Machine(name, name, "gpu", memory, ASSUMED_CONTEXT, False)
        if known is None
        else _of_table(known, memory)
    )
    taken = taken_by_others()
    return found if taken is None else found.without(taken.bytes)


def known_as(name: str, table: Iterable[HardwareConfig]) -> HardwareConfig | None:
    """The GPU that its driver calls so."""
    return next((hardware for hardware in table if name in hardware.names), None)


def _of_table(hardware: HardwareConfig, memory: int) -> Machine:
    context = hardware.context_gib
    return Machine(
        name=hardware.name,
        label=hardware.label,
        device="gpu",
        memory_bytes=memory,
        context_bytes=ASSUMED_CONTEXT if context is None else round(context * _GIB),
        context_is_measured=context is not None,
        flops_per_second=hardware.bf16_tflops * 1e12,
        bytes_per_second=hardware.bandwidth_gb * 1e9,
        fp8_flops_per_second=None if hardware.fp8_tflops is None else hardware.fp8_tflops * 1e12,
    )


def _host_memory() -> int:
    """What this machine has, or what its container may use of it."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    given = _CGROUP.read_text().strip() if _CGROUP.exists() else "max"
    return min(whole, int(given)) if given.isdigit() else whole


def _resident() -> int:
    """Of this process, which has loaded the same libraries as a run."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one process. `needed_bytes` is the sum of the first five."""

    peak_bytes: int  # what lives at most
    buckets_bytes: int  # gradients that data parallelism keeps where one process has none at its peak
    lost_bytes: int  # what the allocator is assumed to take beyond that
    context_bytes: int
    margin_bytes: int
    memory_bytes: int
    kept_bytes: int = 0  # of the peak, what no smaller micro-batch and no recomputation saves

    @property
    def reserved_bytes(self) -> int:
        """What torch takes from the device."""
        return self.peak_bytes + self.buckets_bytes + self.lost_bytes

    @property
    def needed_bytes(self) -> int:
        """With the driver's part and the margin."""
        return self.reserved_bytes + self.context_bytes + self.margin_bytes

    @property
    def fits(self) -> bool:
        """Into the whole memory of the machine."""
        return self.needed_bytes <= self.memory_bytes

    @property
    def is_hopeless(self) -> bool:
        """Whether weights, gradients and states alone are too much."""
        return self.kept_bytes + self.context_bytes + self.margin_bytes > self.memory_bytes


def judge(plan: MemoryPlan, machine: Machine, processes: int = 1) -> Verdict:
    """A processor's memory has no allocator of CUDA."""
    buckets = bucket_bytes(plan, processes)
    share = ALLOCATOR_SHARE[has_expandable_segments()] if machine.device == "gpu" else 0.0
    return Verdict(
        peak_bytes=plan.peak_bytes,
        buckets_bytes=buckets,
        lost_bytes=round(share * (plan.peak_bytes + buckets)),
        context_bytes=machine.context_bytes,
        margin_bytes=round(_MARGIN * machine.memory_bytes),
        memory_bytes=machine.memory_bytes,
        kept_bytes=plan.kept_bytes,
    )


def bucket_bytes(plan: MemoryPlan, processes: int) -> int:
    """Data parallelism keeps all gradients in buckets from step to step; one process has none while it computes forward
    and makes them one by one. At most what is missing of them at the peak: as large as what is trained, in its type.
    """
    if processes == 1:
        return 0
    return max(0, plan.anatomy["trained_weights"] - plan.anatomy["gradients"])


@dataclass(frozen=True, slots=True)
class Bound:
    """Of one process: no step is faster, as if the machine did nothing but the arithmetic, at its full rate."""

    step_seconds: float
    tokens_per_second: float


def bound(plan: MemoryPlan, shape: Shape, machine: Machine, precision: str) -> Bound | None:
    """None where the rate of the machine is not known."""
    if machine.flops_per_second is None or precision not in _RATED or not plan.flops:
        return None
    seconds = _seconds_of_arithmetic(plan, machine)
    return Bound(seconds, shape.tokens * shape.micro_batches / seconds)


def seconds_per_token(run: RunConfig, plan: MemoryPlan, tokens: int, machine: Machine) -> float:
    """Of arithmetic, of unpacking weights where the machine's bandwidth is known, and of copies that take longer than
    the arithmetic beside them. Only its ratio means anything.
    """
    parts = run.batching.accumulation
    seconds = _seconds_of_arithmetic(plan, machine)
    if machine.bytes_per_second and run.quantization.kind != "none":
        uses = parts * (2 + _recomputed_share(run))
        seconds += uses * _packed_weights(run, plan) * _UNPACKED / machine.bytes_per_second
    seconds += parts * _waiting(plan, seconds / parts)
    return seconds / (tokens * parts)


def _seconds_of_arithmetic(plan: MemoryPlan, machine: Machine) -> float:
    """Of a step. Without rates they are seconds of a machine with the rate 1."""
    rate = machine.flops_per_second or 1.0
    in_fp8 = plan.fp8_flops / (machine.fp8_flops_per_second or rate)
    return (plan.flops - plan.fp8_flops) / rate + in_fp8


def _waiting(plan: MemoryPlan, seconds: float) -> float:
    """For copies between device and host that take longer than the arithmetic beside them, of a micro-batch."""
    once = plan.offloaded_bytes / _PCIE_BYTES_PER_SECOND
    return max(0.0, once - _FORWARD_SHARE * seconds) + max(0.0, once - (1 - _FORWARD_SHARE) * seconds)


def _packed_weights(run: RunConfig, plan: MemoryPlan) -> float:
    """From their constants: a scale for each 64, of 8 bits with double quantisation, else of 32."""
    return plan.anatomy["quantization_constants"] * (63.0 if run.quantization.double_quant else 16.0)


def _recomputed_share(run: RunConfig) -> float:
    asked, layers = run.training.recompute, int(run.model.architecture.get("num_hidden_layers", 0))
    if isinstance(asked, bool) or not layers:
        return float(bool(asked))
    return min(1.0, int(asked) / layers)
