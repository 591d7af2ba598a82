"""The processes, the device, the threads: Accelerate, used for what it is good at and kept from the rest."""

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from app.config.schema import LaunchConfig, ParallelConfig
from app.distributed.environment import world
from app.distributed.failure_flag import FailureFlag
from app.distributed.fsdp import Sharding
from app.distributed.host_group import Peers
from app.distributed.mesh import arrangement, device_mesh
from app.distributed.reduction import Alone, Divided, Reduction, Together

# Accelerate takes these over its arguments: it would divide our loss, or choose a precision of its own
_HIJACKING = ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_MIXED_PRECISION")
_PATIENCE = timedelta(hours=1)  # with a process that writes a large model to a slow disk


@dataclass(frozen=True, slots=True)
class Runtime:
    """Where this process runs and how it speaks with the others."""

    accelerator: Any
    device: torch.device
    peers: Peers
    threads: int
    flag: FailureFlag | None = None  # where there are several processes

    @property
    def rank(self) -> int:
        """Of this process; 0 is the one that speaks and writes."""
        return self.peers.rank

    @property
    def processes(self) -> int:
        """Of the whole run."""
        return self.peers.count

    def sharding(self, parallel: ParallelConfig) -> Sharding | None:
        """How a model is divided; None where every process has the whole of it."""
        if not parallel.divides or self.processes == 1:
            return None
        shard, replicate = (
            None if each == "auto" else int(each) for each in (parallel.shard, parallel.replicate)
        )
        arranged = arrangement(parallel.kind, shard, replicate, self.processes, world().local_size)
        return Sharding(
            device_mesh(self.device.type, arranged),
            reshard=parallel.reshard,
            sync_each=parallel.sync == "each",
            offload=parallel.offload,
        )

    def reduction(
        self, parameters: Sequence[nn.Parameter], sharding: Sharding | None, *, whole_matrices: bool
    ) -> Reduction:
        """Gradients of `parameters` as sums over all processes.

        What is frozen or a buffer is the same everywhere by construction and is not sent round.
        """
        if self.processes == 1:
            return Alone(parameters)
        if sharding is None:
            return Together(parameters)
        return Divided(parameters, sharding, whole_matrices=whole_matrices)

    def seed(self, seed: int) -> None:
        """Random numbers of this process's own: what it drops out is not what another one does."""
        torch.manual_seed(seed + self.rank)

    def leave(self) -> None:
        """End together: a launcher takes a process that ends early with a code of its own for a failure of all."""
        if self.flag is not None:
            self.flag.let_down()
        self.peers.wait_for_all()
        if self.processes > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def peak_memory_bytes(self) -> int:
        """The most memory so far: of the device, or of the process without one."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def default_device() -> torch.device:
    """Where a process of this machine computes, before it has been given its own device."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def idle_gpus() -> list[str]:
    """A remark where this machine has more GPUs than the run takes."""
    visible, used = torch.cuda.device_count(), world().local_size
    if visible <= used:
        return []
    return [f"{visible} GPUs are visible and {used} of them used; launch.num_processes=auto takes all"]


def parallel_notes(parallel: ParallelConfig, processes: int) -> list[str]:
    """A remark where there is nobody to divide with."""
    if not parallel.divides or processes > 1:
        return []
    return [
        f"parallel={parallel.kind} divides nothing among one process; launch.num_processes=auto takes all GPUs"
    ]


def crowded_cores() -> list[str]:
    """A remark where processes without GPUs are more than there are cores."""
    cores, processes = len(os.sched_getaffinity(0)), world().local_size
    if torch.cuda.is_available() or processes <= cores:
        return []
    return [
        f"{processes} processes share {cores} core{'s' * (cores > 1)}, and so does all else on this machine; more "
        f"processes than cores make nothing faster: launch.num_processes={cores}"
    ]


def start(launch: LaunchConfig, precision: str, seed: int) -> Runtime:
    """The runtime of this process, its threads and its random numbers set; returns when all processes are there."""
    for name in _HIJACKING:
        os.environ.pop(name, None)
    cores = len(os.sched_getaffinity(0))
    threads = launch.threads or max(1, cores // world().local_size)
    accelerator = _accelerator(threads)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    peers = Peers(accelerator.process_index, accelerator.num_processes, _host_group(accelerator))
    # a CPU with a number is to torch another device than its tensors have, which would be copied
    device = accelerator.device if accelerator.device.type != "cpu" else torch.device("cpu")
    flag = FailureFlag(peers.rank) if peers.count > 1 else None
    if flag is not None:
        flag.watch()
    runtime = Runtime(accelerator, device, peers, torch.get_num_threads(), flag)
    runtime.seed(seed)
    return runtime


def _accelerator(threads: int) -> Any:
    from accelerate import Accelerator, InitProcessGroupKwargs

    on_cpu = not torch.cuda.is_available()
    handlers: list[Any] = []
    if world().is_joined:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # it would warn that nobody has said it
        handlers = [InitProcessGroupKwargs(backend="gloo" if on_cpu else "nccl", timeout=_PATIENCE)]
    return Accelerator(
        cpu=on_cpu,  # without it, two processes on a machine without a GPU would each train alone
        mixed_precision="no",
        gradient_accumulation_steps=1,
        kwargs_handlers=handlers,
    )


def _host_group(accelerator: Any) -> Any:
    """For numbers that are on the host already: NCCL would take them over the device and back."""
    if accelerator.num_processes == 1:
        return None
    return torch.distributed.new_group(backend="gloo", timeout=_PATIENCE)
