"""Memory and speed of a machine: whether a plan fits, with allocator and driver overhead, and a bound on step time."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from app.config.hardware import HardwareConfig, all_hardware
from app.config.quantizations import QUANTIZATION_KINDS
from app.config.schema import RunConfig
from app.memory.cublas import local_capability, workspace_bytes
from app.memory.estimate import MemoryPlan
from app.memory.shape import Shape
from app.training.memory_in_use import host_bytes, taken_by_others
from app.training.torch_environment import has_expandable_segments

_GIB = 1 << 30
# CUDA context and loaded kernels of a GPU on which they were not measured
ASSUMED_CONTEXT_BYTES = 784 << 20
_MARGIN_SHARE = 0.03  # of the memory of the machine, for other processes and kernels that are loaded late
# Fragmentation in torch's CUDA caching allocator as a share of live bytes. On an H200 with expandable segments at most
# 2.2 % in steps of 8B, compiled or not; without them simulated, at most 11.4 %.
_SHARE = 0.025
_SHARE_WITHOUT_EXPANDABLE_SEGMENTS = 0.12

_UNPACKS = 3  # of a 4-bit weight in a micro-batch: forward, recomputed forward, backward
_UNPACK_BYTES_PER_WEIGHT = 2.5  # extra memory traffic of a 4-bit weight that is dequantised to bf16
_PCIE_BYTES_PER_SECOND = 50e9  # PCIe 5 with pinned memory
_PRECISIONS_AT_BF16_RATE = ("bf16", "fp16", "auto")


@dataclass(frozen=True, slots=True)
class Hardware:
    """Memory and rates of a GPU or CPU. Unknown rates are None. `context_bytes`: memory before the first tensor."""

    name: str
    label: str
    device: str  # gpu or cpu
    memory_bytes: int
    context_bytes: int
    context_is_measured: bool
    flops_per_second: float | None = None
    bytes_per_second: float | None = None
    fp8_flops_per_second: float | None = None
    workspace_bytes: int = 0  # of cuBLAS, in torch's allocator


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
    known = hardware_named(name)
    machine = (
        Hardware(
            name, name, "gpu", memory, ASSUMED_CONTEXT_BYTES, False, workspace_bytes=workspace_bytes(local_capability())
        )
        if known is None
        else _table_machine(known, memory)
    )
    in_use = taken_by_others()
    if in_use is None:
        return machine
    others = f", of which others hold {in_use.bytes / 1e9:.1f} GB" if in_use.bytes >= _GIB else ""
    # what the driver reserves is in its total and in use, but not in the memory that torch counts
    free = min(memory, in_use.total - in_use.bytes)
    return replace(machine, label=machine.label + others, memory_bytes=free)


def hardware_named(name: str) -> HardwareConfig | None:
    """Entry of the `hardware` group by the name that a GPU's driver reports."""
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
        flops_per_second=hardware.bf16_tflops * 1e12,
        bytes_per_second=hardware.bandwidth_gb * 1e9,
        fp8_flops_per_second=None if hardware.fp8_tflops is None else hardware.fp8_tflops * 1e12,
        workspace_bytes=workspace_bytes(hardware.capability),
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Memory that one process needs and has. `needed_bytes` is the sum of the first four fields."""

    peak_bytes: int  # live tensors
    lost_bytes: int  # assumed fragmentation in the allocator
    context_bytes: int
    margin_bytes: int
    memory_bytes: int
    kept_bytes: int = 0  # weights, gradients and optimizer states

    @property
    def reserved_bytes(self) -> int:
        """Memory that torch reserves."""
        return self.peak_bytes + self.lost_bytes

    @property
    def needed_bytes(self) -> int:
        return self.reserved_bytes + self.context_bytes + self.margin_bytes

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.memory_bytes

    @property
    def is_hopeless(self) -> bool:
        """Whether weights, gradients and states alone do not fit, so that smaller micro-batches do not help."""
        return self.kept_bytes + self.context_bytes + self.margin_bytes > self.memory_bytes


def check_fit(plan: MemoryPlan, machine: Hardware) -> Verdict:
    """Compare a plan with the memory of a machine."""
    return Verdict(
        peak_bytes=plan.peak_bytes,
        lost_bytes=round(_allocator_share(machine) * plan.peak_bytes),
        context_bytes=machine.context_bytes,
        margin_bytes=round(_MARGIN_SHARE * machine.memory_bytes),
        memory_bytes=machine.memory_bytes,
        kept_bytes=plan.kept_bytes,
    )


def _allocator_share(machine: Hardware) -> float:
    """A CPU has no caching allocator."""
    if machine.device == "cpu":
        return 0.0
    return _SHARE if has_expandable_segments() else _SHARE_WITHOUT_EXPANDABLE_SEGMENTS


def time_bound(plan: MemoryPlan, shape: Shape, machine: Hardware, precision: str) -> dict[str, float] | None:
    """Time that no step can beat: its FLOPs at the peak rate of the machine; None if the rate is unknown."""
    if machine.flops_per_second is None or precision not in _PRECISIONS_AT_BF16_RATE or not plan.flops:
        return None
    seconds = _compute_seconds(plan, machine)
    return {"step_seconds": seconds, "tokens_per_second": shape.tokens * shape.micro_batches / seconds}


def seconds_per_token(run: RunConfig, plan: MemoryPlan, tokens: int, machine: Hardware) -> float:
    """Relative time of a token: compute, dequantisation if the bandwidth is known, and copies to the host and back.

    Meaningful only in comparison with other settings on the same machine.
    """
    micro_batches = run.batching.accumulation
    seconds = _compute_seconds(plan, machine) / micro_batches
    if machine.bytes_per_second:
        base = run.quantization
        per_byte = QUANTIZATION_KINDS[base.kind].weights_per_scale_byte[base.double_quant]
        unpacked_bytes = plan.anatomy["quantization_constants"] * per_byte * _UNPACK_BYTES_PER_WEIGHT
        seconds += _UNPACKS * unpacked_bytes / machine.bytes_per_second
    seconds += 2 * plan.offloaded_bytes / _PCIE_BYTES_PER_SECOND
    return seconds / tokens


def _compute_seconds(plan: MemoryPlan, machine: Hardware) -> float:
    """Time of the FLOPs of a step; machines without a known rate count 1 FLOP per second."""
    rate = machine.flops_per_second or 1.0
    in_fp8 = plan.fp8_flops / (machine.fp8_flops_per_second or rate)
    return (plan.flops - plan.fp8_flops) / rate + in_fp8
