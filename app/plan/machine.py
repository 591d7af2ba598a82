"""What a run would run on: a GPU of the table, or the machine at hand."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from app.config.hardware import HardwareConfig, every_hardware
from app.engine.taken import taken_by_others

_GIB = 1 << 30
# CUDA's context, the kernels that are loaded, cuBLAS' workspaces; taken for a GPU of which it was not measured
ASSUMED_CONTEXT = 800 << 20
_LITTLE = 1 << 30
_CGROUP = Path("/sys/fs/cgroup/memory.max")


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
    known = known_as(name, every_hardware())
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
