"""Memory and utilization of the GPU of this process, other processes on it, and its clocks, read from NVML or CUDA."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import pynvml
import torch

from app.distributed.launch import world
from app.distributed.process_group import HostGroup

MAX_CONTEXT_BYTES = 1 << 30  # of the CUDA context, kernels, libraries and paged states of a process
NEGLIGIBLE_SHARE = 0.01  # of the memory

Sample = tuple[int, int]  # time in microseconds, percent


# ---- readings


@dataclass(frozen=True, slots=True)
class Reading:
    """Memory in use on a GPU, without the memory reserved by the driver, and the part that torch's allocator reserved.

    `processes` has the bytes of compute processes by pid, None where the driver does not report them.
    """

    total: int
    used: int
    processes: Mapping[int, int | None]
    reserved: int = 0
    peak_reserved: int = 0
    by_driver: bool = True  # False: by CUDA, after it has created the context of this process


def read_driver(nvml: Any, gpu: Any, reserved: int = 0, peak_reserved: int = 0) -> Reading:
    """Return the memory in use according to NVML."""
    memory = nvml.nvmlDeviceGetMemoryInfo(gpu, version=nvml.nvmlMemory_v2)  # version 1 counts reserved memory as used
    processes = {}
    with suppress(nvml.NVMLError):  # not supported on WSL
        running = nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
        processes = {process.pid: process.usedGpuMemory for process in running}
    return Reading(memory.total - memory.reserved, memory.used, processes, reserved, peak_reserved)


def read_gpu() -> Reading | None:
    """Return the memory in use on the GPU of this process; None without a GPU, or if it cannot be read."""
    if not torch.cuda.is_available():
        return None
    device = world().local_rank
    try:
        reserved, peak_reserved = torch.cuda.memory_reserved(device), torch.cuda.max_memory_reserved(device)
        with suppress(pynvml.NVMLError):
            return read_driver(pynvml, _gpu(), reserved, peak_reserved)
        free, total = torch.cuda.mem_get_info(device)
    except (RuntimeError, AssertionError):
        return None
    return Reading(total, total - free, {}, reserved, peak_reserved, by_driver=False)


def free_workspaces() -> int:
    """Free the workspaces of cuBLAS, which torch allocates again if needed, and return their bytes."""
    device = world().local_rank
    allocated = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    return allocated - torch.cuda.memory_allocated(device)


@cache
def _gpu() -> Any:
    pynvml.nvmlInit()
    uuid = getattr(torch.cuda.get_device_properties(world().local_rank), "uuid", "")
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")


# ---- this process and others


@dataclass(frozen=True, slots=True)
class Taken:
    """GPU memory of other processes. `processes` is empty if this process may be listed by another pid."""

    total: int
    bytes: int
    processes: tuple[tuple[int, int | None], ...] = ()  # pid, and bytes if the driver reports them
    count: int = 0

    @property
    def words(self) -> str:
        pids = ", ".join(
            f"pid {pid}" + ("" if size is None else f": {size / 1e9:.1f} GB") for pid, size in self.processes
        )
        by = f" ({pids})" if pids else ""
        return f"{self.bytes / 1e9:.1f} of {self.total / 1e9:.1f} GB of GPU memory{by}"

    @property
    def is_negligible(self) -> bool:
        return self.bytes <= NEGLIGIBLE_SHARE * self.total


@dataclass(frozen=True, slots=True)
class Usage:
    """GPU memory of this process and of others. It is estimated if the driver does not report this process."""

    bytes: int
    is_estimated: bool
    others: Taken


def usage_of(reading: Reading, pid: int, unlisted_bytes: int = 0) -> Usage:
    """Return the memory of the process `pid` and of all others.

    Where the driver does not report the size of the process, as in containers, on WSL and on MIG devices, it is
    estimated by the memory of the allocator. `unlisted_bytes`: memory of the process beyond either size.
    """
    size = listed_bytes(reading, pid)
    unlisted_bytes = unlisted_bytes if reading.by_driver else MAX_CONTEXT_BYTES
    everything = min(reading.used, (size or reading.reserved) + unlisted_bytes)
    is_estimated = not size and everything > 0
    others = tuple(sorted((number, sizes) for number, sizes in reading.processes.items() if number != pid))
    count = len(others)
    if is_estimated and count and pid not in reading.processes:  # listed by its pid outside of the container
        others, count = (), count - 1
    taken = Taken(reading.total, reading.used - everything, others, count)
    return Usage(size or everything, is_estimated, taken)


def listed_bytes(reading: Reading, pid: int) -> int:
    """Return the memory of the process `pid` according to the driver; 0 if it is not reported."""
    size = reading.processes.get(pid) or 0
    # some drivers list a process of a container with 0 bytes: github.com/NVIDIA/open-gpu-kernel-modules/pull/614
    return size if size >= reading.reserved else 0


@cache
def taken_by_others() -> Taken | None:
    """Return the GPU memory in use by other processes at the first call; None without a GPU or if unreadable."""
    reading = read_gpu()
    return None if reading is None else usage_of(reading, os.getpid()).others


def notes() -> list[str]:
    """Return a note if other processes use more than a negligible share of GPU memory."""
    taken = taken_by_others()
    return [] if taken is None or taken.is_negligible else [f"other processes use {taken.words}"]


# ---- utilization and clocks


def read_samples(nvml: Any, gpu: Any, newest: int) -> list[Sample]:
    """Return the utilization samples after the time `newest`; empty without any, or if the GPU takes none."""
    try:
        _, samples = nvml.nvmlDeviceGetSamples(gpu, nvml.NVML_GPU_UTILIZATION_SAMPLES, newest)
    except nvml.NVMLError:
        return []
    pairs = ((sample.timeStamp, sample.sampleValue.uiVal) for sample in samples)
    return [(at, percent) for at, percent in pairs if at > newest]


def gpu_samples(newest: int) -> list[Sample]:
    """Return the utilization samples of the GPU of this process; empty without a GPU or its driver."""
    with suppress(pynvml.NVMLError):
        return read_samples(pynvml, _gpu(), newest) if torch.cuda.is_available() else []
    return []


def read_clocks(nvml: Any, gpu: Any) -> dict[str, float]:
    """Return clocks in MHz and the power limit in watts, those that the driver reports."""
    queries: dict[str, Callable[[], float]] = {
        "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
        "max_sm_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
        "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
        "power_limit_watts": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    }
    values = {}
    for name, query in queries.items():
        with suppress(nvml.NVMLError):  # not supported by every GPU
            values[name] = query()
    return values


def clocks() -> dict[str, float] | None:
    """Return the clocks of the GPU of this process; None without a GPU or its driver."""
    with suppress(pynvml.NVMLError):
        return read_clocks(pynvml, _gpu()) if torch.cuda.is_available() else None
    return None


# ---- a run


class GpuMonitor:
    """The GPU of this process during a run: memory at stages, peak, most memory of other processes, utilization.

    Create it before this process uses the GPU. Without a GPU it has no stages.
    """

    def __init__(
        self, read: Callable[[], Reading | None] = read_gpu, samples: Callable[[int], list[Sample]] = gpu_samples
    ) -> None:
        self.stages: dict[str, int] = {}  # memory of this process by stage
        self._read, self._samples = read, samples
        self._used_at_start = self._unlisted_bytes = self._peak_bytes = 0
        self._is_estimated, self._others = False, Taken(0, 0)
        self._newest = 0  # time of the last utilization sample
        self._percents: list[int] = []
        start = read()
        if start is not None:
            self._used_at_start = start.used
            self.stages["start"] = self._add(start).bytes

    def note_stage(self, name: str) -> bool:
        """Read the memory at the first call with this name; return whether it was read."""
        reading = None if name in self.stages else self._read()
        if reading is None:
            return False
        listed = listed_bytes(reading, os.getpid()) or reading.reserved
        unlisted_bytes = reading.used - self._used_at_start - listed
        if 0 <= unlisted_bytes <= MAX_CONTEXT_BYTES:  # otherwise another process started or ended meanwhile
            self._unlisted_bytes = unlisted_bytes
        self.stages[name] = self._add(reading).bytes
        self._newest = time.time_ns() // 1000  # utilization counts after the last stage
        return True

    def line(self, host_group: HostGroup) -> dict[str, float]:
        """Return values for a line of metrics.jsonl: memory now, and utilization since the line before."""
        reading, percents = self._read(), self._new_percents()
        usage = Usage(0, False, Taken(0, 0)) if reading is None else self._add(reading)
        by_rank = host_group.gathered([usage.bytes, usage.others.bytes, sum(percents), len(percents)])
        in_use, others, sums, counts = zip(*by_rank, strict=True)
        memory = {"device_used_bytes": int(max(in_use)), "other_processes_bytes": int(max(others))}
        return {**(memory if max(in_use) else {}), **_utilization(sum(sums), sum(counts))}

    def result(self, host_group: HostGroup) -> dict[str, Any]:
        """Return values for result.json: of all processes of the run, the most; and the mean utilization."""
        self.note_others()
        self._new_percents()
        mine = [self._peak_bytes, self._is_estimated, self._others.bytes, self._others.count]
        by_rank = host_group.gathered([*mine, sum(self._percents), len(self._percents)])
        peaks, estimated, others, _, sums, counts = zip(*by_rank, strict=True)
        if not max(peaks):
            return {}
        most = by_rank[others.index(max(others))]
        return {
            "device_used_bytes": int(max(peaks)),
            **({"device_is_estimated": True} if any(estimated) else {}),
            "other_processes": {"count": int(most[3]), "bytes": int(most[2])},
            **_utilization(sum(sums), sum(counts)),
        }

    def note_others(self) -> list[str]:
        """Read the memory, and return a note if other processes used more than a negligible share during the run."""
        reading = self._read()
        if reading is not None:
            self._add(reading)
        return [] if self._others.is_negligible else [f"other processes used up to {self._others.words}"]

    def _add(self, reading: Reading) -> Usage:
        usage = usage_of(reading, os.getpid(), self._unlisted_bytes)
        self._peak_bytes = max(self._peak_bytes, usage.bytes + reading.peak_reserved - reading.reserved)
        self._is_estimated = usage.is_estimated
        if usage.others.bytes >= self._others.bytes:
            self._others = usage.others
        return usage

    def _new_percents(self) -> list[int]:
        samples = self._samples(self._newest)
        self._newest = max([self._newest, *(at for at, _ in samples)])
        percents = [percent for _, percent in samples]
        self._percents += percents
        return percents


def _utilization(percents: float, count: float) -> dict[str, float]:
    return {"gpu_utilization": percents / count / 100} if count else {}
