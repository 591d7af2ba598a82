"""What other processes hold of a GPU, asked of its driver before this one takes anything."""

import os
from dataclasses import dataclass
from functools import cache

import torch

from app.distributed.environment import world

_OWN = 1 << 30  # at most what this process's own context takes, where only the sum is known
_LITTLE = 0.01  # of the memory, which is nothing to speak of


@dataclass(frozen=True, slots=True)
class Taken:
    """By others, in bytes. Containers do not see whose: then `processes` is empty."""

    total: int
    bytes: int
    processes: tuple[tuple[int, int | None], ...] = ()  # pid, and bytes where they are told

    @property
    def words(self) -> str:
        """For people."""
        each = ", ".join(
            f"pid {pid}" + ("" if size is None else f": {size / 1e9:.1f} GB") for pid, size in self.processes
        )
        by = f" ({each})" if each else ""
        return f"{self.bytes / 1e9:.1f} GB of {self.total / 1e9:.1f} GB are taken by other processes{by}"


def notes() -> list[str]:
    """A remark where a good part of the GPU is not there for this run."""
    taken = taken_by_others()
    return [] if taken is None or taken.bytes < _LITTLE * taken.total else [taken.words]


@cache
def taken_by_others() -> Taken | None:
    """Of the GPU of this process, as it was when first asked. None without a GPU, or where nobody tells."""
    if not torch.cuda.is_available():
        return None
    try:
        device = world().local_rank
        uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
        return _asked_of_driver(uuid) or _asked_of_cuda(device)
    except (RuntimeError, AssertionError):
        return None


def _asked_of_cuda(device: int) -> Taken:
    """Where only the sum is known: no less than this is taken."""
    free, total = torch.cuda.mem_get_info(device)
    return Taken(total, max(0, total - free - _OWN))


def _asked_of_driver(uuid: str) -> Taken | None:
    """By NVML, which needs no context on the GPU and knows whose memory it is; None where nvidia-ml-py is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            memory = pynvml.nvmlDeviceGetMemoryInfo(device)
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    processes = {each.pid: each.usedGpuMemory for each in running}
    own = processes.pop(os.getpid(), None) or 0
    return Taken(memory.total, max(0, memory.used - own), tuple(sorted(processes.items())))
