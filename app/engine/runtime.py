"""The processes, the device, the threads: Accelerate, used for what it is good at and kept from the rest."""

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from app.config.schema import LaunchConfig

# Accelerate takes these over its arguments: it would divide our loss, or choose a precision of its own
_HIJACKING = ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_MIXED_PRECISION")


@dataclass(frozen=True, slots=True)
class Runtime:
    """Where this process runs and how it speaks with the others."""

    accelerator: Any
    device: torch.device
    rank: int
    processes: int
    threads: int

    def totals(self, values: Sequence[float]) -> list[float]:
        """Each value summed over all processes."""
        if self.processes == 1:
            return [float(v) for v in values]
        local = torch.tensor(values, dtype=torch.float64, device=self.device)
        summed: list[float] = self.accelerator.reduce(local, "sum").tolist()
        return summed

    def peak_memory_bytes(self) -> int:
        """The most memory so far: of the device, or of the process without one."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def default_device() -> torch.device:
    """Where a process of this machine computes, before it has been given its own device."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def start(launch: LaunchConfig, precision: str, seed: int) -> Runtime:
    """The runtime of this process, its threads and its random numbers set."""
    from accelerate import Accelerator

    for name in _HIJACKING:
        os.environ.pop(name, None)
    # without cpu=True, two processes on a machine without a GPU would each train alone
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), mixed_precision="no", gradient_accumulation_steps=1
    )
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(launch.threads or max(1, cores // accelerator.num_processes))
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.manual_seed(seed + accelerator.process_index)
    return Runtime(
        accelerator=accelerator,
        device=accelerator.device,
        rank=accelerator.process_index,
        processes=accelerator.num_processes,
        threads=torch.get_num_threads(),
    )
