"""Estimated and measured peak memory of a run; CPU memory of the machine."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.batch import Batch
from app.distributed.process_group import Runtime
from app.errors import ConfigError, first_line
from app.tracking.formatting import format_bytes, speedup_line
from app.training.storage_counter import StorageCounter, kept_tensors
from app.training.train_step import Stepper, StepResult

CGROUPS = Path("/sys/fs/cgroup")


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
