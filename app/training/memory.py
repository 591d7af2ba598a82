"""Estimated and measured peak memory of a run; memory in use on GPU and host, and GPU clocks."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from app.batch import Batch
from app.distributed.launch import world
from app.distributed.process_group import Runtime
from app.errors import ConfigError, first_line
from app.tracking.formatting import format_bytes, speedup_line
from app.training.storage_counter import StorageCounter, kept_tensors
from app.training.train_step import Stepper, StepResult

MAX_CONTEXT_BYTES = 1 << 30  # of this process, if only the sum over processes is available
NEGLIGIBLE_SHARE = 0.01  # of the memory
CGROUPS = Path("/sys/fs/cgroup")

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Taken:
    """Bytes used by other processes; `processes` is empty in containers, where their pids are hidden."""

    total: int
    bytes: int
    processes: tuple[tuple[int, int | None], ...] = ()  # pid, and bytes if the driver reports them

    @property
    def words(self) -> str:
        pids = ", ".join(
            f"pid {pid}" + ("" if size is None else f": {size / 1e9:.1f} GB") for pid, size in self.processes
        )
        by = f" ({pids})" if pids else ""
        return f"other processes use {self.bytes / 1e9:.1f} of {self.total / 1e9:.1f} GB of GPU memory{by}"


def notes() -> list[str]:
    """Return a note if other processes use more than a negligible share of GPU memory."""
    taken = taken_by_others()
    return [] if taken is None or taken.bytes < NEGLIGIBLE_SHARE * taken.total else [taken.words]


@cache
def taken_by_others() -> Taken | None:
    """Return the GPU memory in use by other processes at the first call; None without a GPU or if unreadable."""
    if not torch.cuda.is_available():
        return None
    try:
        return taken_by_driver(_uuid()) or taken_by_cuda(world().local_rank)
    except (RuntimeError, AssertionError):
        return None


def device_used_bytes() -> int | None:
    """Return the memory in use on the GPU of this process; None without a GPU, or if other processes use it too."""
    if not torch.cuda.is_available():
        return None
    device = world().local_rank
    with suppress(Exception):  # nvidia-ml-py is missing, or raises its own errors
        used = int(torch.cuda.device_memory_used(device))
        return None if _nvml_query(_uuid(), _has_others) else used
    free, total = torch.cuda.mem_get_info(device)  # creates the CUDA context of this process if there is none
    return total - free


def _has_others(driver: Any, gpu: Any) -> bool:
    """Return whether the driver lists other processes. In a container it may list this one by another pid."""
    pids = {process.pid for process in driver.nvmlDeviceGetComputeRunningProcesses(gpu)}
    is_renamed = os.getpid() not in pids and torch.cuda.memory_reserved(world().local_rank) > 0
    return len(pids - {os.getpid()}) > int(is_renamed)


def clocks() -> dict[str, float] | None:
    """Return clocks in MHz and the power limit in watts, if the driver reports them; None without a driver."""
    return _nvml_query(_uuid(), _clocks) if torch.cuda.is_available() else None


def _clocks(driver: Any, gpu: Any) -> dict[str, float]:
    queries: dict[str, Callable[[], float]] = {
        "sm_mhz": lambda: driver.nvmlDeviceGetClockInfo(gpu, driver.NVML_CLOCK_SM),
        "max_sm_mhz": lambda: driver.nvmlDeviceGetMaxClockInfo(gpu, driver.NVML_CLOCK_SM),
        "memory_mhz": lambda: driver.nvmlDeviceGetClockInfo(gpu, driver.NVML_CLOCK_MEM),
        "power_limit_watts": lambda: driver.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    }
    values = {}
    for name, query in queries.items():
        with suppress(driver.NVMLError):  # not supported by every GPU
            values[name] = query()
    return values


def _uuid() -> str:
    return str(getattr(torch.cuda.get_device_properties(world().local_rank), "uuid", ""))


def taken_by_cuda(device: int) -> Taken:
    """Return a lower bound from the sum over all processes."""
    free, total = torch.cuda.mem_get_info(device)
    return Taken(total, max(0, total - free - MAX_CONTEXT_BYTES))


def taken_by_driver(uuid: str) -> Taken | None:
    """Return the memory of other processes, by process, without the CUDA context of this one."""

    def taken(driver: Any, gpu: Any) -> Taken:
        memory = driver.nvmlDeviceGetMemoryInfo(gpu)
        running = driver.nvmlDeviceGetComputeRunningProcesses(gpu)
        processes = {process.pid: process.usedGpuMemory for process in running}
        used_here = processes.pop(os.getpid(), None) or 0
        return Taken(memory.total, max(0, memory.used - used_here), tuple(sorted(processes.items())))

    return _nvml_query(uuid, taken)


def _nvml_query(uuid: str, query: Callable[[Any, Any], Answer]) -> Answer | None:
    """Return the result of an NVML query on a GPU; None if nvidia-ml-py is missing or the driver has no answer."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            return query(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def free_host_bytes() -> int:
    """Return the free CPU memory, within the limits of a container or job."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kilobytes = {name: int(size) for name, size, *_ in lines}
    free = 1024 * (kilobytes["MemAvailable:"] + kilobytes["SwapFree:"])
    return max(0, min([free, *(limit - used for limit, used in _limits())]))


def host_bytes() -> int:
    """Return the CPU memory of the machine, or the limit of a container or job."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *(limit for limit, _ in _limits())])


def _limits() -> Iterator[tuple[int, int]]:
    """Yield each memory limit of this process (cgroup v2) and its usage without the page cache."""
    group = Path("/proc/self/cgroup").read_text().partition("0::/")[2].strip()
    folder = CGROUPS / group if (CGROUPS / group).is_dir() else CGROUPS  # the path is hidden in a container
    while folder != CGROUPS.parent:
        limit = folder / "memory.max"
        if limit.is_file() and limit.read_text().strip().isdigit():
            used = int((folder / "memory.current").read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield int(limit.read_text()), used - int(stat["inactive_file"]) - int(stat["active_file"])
        folder = folder.parent


# ---- memory


COUNTED_STEP = 2  # of this start: the first step allocates the optimizer states


@dataclass(frozen=True, slots=True)
class Predicted:
    """Estimated peak of one process: on a CPU of a step, on a GPU of the run, with faster settings that fit."""

    bytes: int
    where: str
    anatomy: dict[str, int]
    faster: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Forecast:
    """A memory estimate, or the reason why there is none."""

    predicted: Predicted | None
    text: str

    @classmethod
    def estimate(cls, predict: Callable[..., Predicted], *arguments: Any) -> "Forecast":
        """Estimate the peak; a model without an estimate can still be trained."""
        try:
            predicted = predict(*arguments)
        except ConfigError as reason:
            return cls(None, str(reason))
        except Exception as fault:  # noqa: BLE001  a run does not depend on its estimate
            return cls(None, f"no estimate for this model ({type(fault).__name__}: {first_line(fault)[:200]})")
        return cls(predicted, f"estimated peak {format_bytes(predicted.bytes)} (tensors), during {predicted.where}")

    def rows(self, *, is_new: bool = True) -> list[tuple[str, str]]:
        """Rows for the first table of a run; a resumed run has no faster settings, because it keeps its settings."""
        faster = map(speedup_line, self.predicted.faster if self.predicted and is_new else ())
        rows = [("memory", self.text), ("faster", "\n".join(faster))]
        return [(name, text) for name, text in rows if text]

    def facts(self) -> dict[str, Any]:
        return {} if self.predicted is None else asdict(self.predicted)


class Measured:
    """Measures the peak memory of steps. On a CPU one step runs under a storage counter; results do not change."""

    def __init__(self, runtime: Runtime, steps: int) -> None:
        self._runtime = runtime
        self._counted_at = min(COUNTED_STEP, steps)
        self._steps = 0
        self._peak: int | None = None

    def run(self, stepper: Stepper, batches: Sequence[Batch], lr: float) -> StepResult:
        """Run a step, under the storage counter if it is the step to count."""
        self._steps += 1
        # compiled layers allocate storages without operations that the counter sees
        is_compiled = stepper.model.compiled_layers is not None
        if self._steps != self._counted_at or self._runtime.device.type != "cpu" or is_compiled:
            return stepper.run(batches, lr)
        counter = StorageCounter()
        for kind, tensors in kept_tensors(stepper.model, stepper.optimizer).items():
            counter.hold(kind, tensors)
        if self._runtime.processes > 1:  # with DDP these persist: gradients are views of the buckets
            counter.hold("gradients", (p.grad for p in stepper.model.parameters() if p.grad is not None))
        for batch in batches:
            counter.ignore(batch.tensors)
        with counter:
            result = stepper.run(batches, lr)
        self._peak = counter.peak
        return result

    @property
    def bytes(self) -> int | None:
        """The peak so far; None before it is measured."""
        return self._peak if self._runtime.device.type == "cpu" else self._runtime.peak_memory_bytes()
