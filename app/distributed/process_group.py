"""Process group of a run, and a fake one for traces."""

import os
import resource
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore  # its import registers the backend

from app.batch import Batch
from app.config.schema import LaunchConfig, ParallelConfig
from app.distributed.context import ContextGroup, context_group
from app.distributed.fsdp import MeshSizes, Sharding, device_mesh, mesh_sizes_of
from app.distributed.launch import FailureFlag, stop_watching, wait_until_connected, world
from app.errors import EnvironmentProblem

# these override the arguments of Accelerate: it would divide our loss, or choose another precision
_ACCELERATE_VARIABLES = ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_MIXED_PRECISION")
_TIMEOUT = timedelta(hours=1)  # for a process that writes a large model to a slow disk

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class HostGroup:
    """All processes of the run, which exchange a few numbers on the CPU, never through a device.

    `group`: of gloo; None with one process.
    """

    rank: int
    count: int
    group: Any = None

    def gathered(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of every process, by rank."""
        if self.group is None:
            return [[float(value) for value in values]]
        mine = torch.tensor(values, dtype=torch.float64)
        by_rank = [torch.empty_like(mine) for _ in range(self.count)]
        torch.distributed.all_gather(by_rank, mine, group=self.group)
        return [tensor.tolist() for tensor in by_rank]

    def totals(self, values: Sequence[float]) -> list[float]:
        """Return each value summed over all processes, in the same order on each."""
        return [sum(column) for column in zip(*self.gathered(values), strict=True)]

    def max(self, value: float) -> float:
        """Return the maximum over all processes."""
        return max(number for (number,) in self.gathered([value]))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return a plain object of every process, by rank."""
        if self.group is None:
            return [value]
        by_rank: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(by_rank, value, group=self.group)
        return by_rank

    def lockstep(self, items: Iterable[Item]) -> Iterator[Item | None]:
        """Yield equally often on every process: None after the last item if others have more."""
        waiting = iter(items)
        while True:
            item = next(waiting, None)
            if not self.max(item is not None):
                return
            yield item

    def wait_for_all(self) -> None:
        if self.group is not None:
            torch.distributed.barrier(group=self.group)

    def require_same(self, facts: Mapping[str, Any]) -> None:
        """Raise if the processes have different facts."""
        for rank, theirs in enumerate(self.all_gather_object(dict(facts))):
            different = [
                f"{key}: {facts.get(key)} on process {self.rank}, {theirs.get(key)} on process {rank}"
                for key in sorted({*facts, *theirs})
                if facts.get(key) != theirs.get(key)
            ]
            if different:
                raise EnvironmentProblem(
                    f"the processes of this run differ ({'; '.join(different[:4])}). Use the same settings for "
                    "all of them, and put output_dir and the data on a shared disk."
                )


@dataclass(frozen=True, slots=True)
class Runtime:
    """The device, threads and process groups of this process. `context`: the ranks that share its rows, if any."""

    accelerator: Any
    device: torch.device
    host_group: HostGroup
    threads: int
    context: ContextGroup | None = None

    @property
    def rank(self) -> int:
        """Rank; 0 prints and writes files."""
        return self.host_group.rank

    @property
    def processes(self) -> int:
        return self.host_group.count

    @property
    def readers(self) -> int:
        """Number of processes, or groups of them, that read different rows."""
        return self.processes if self.context is None else self.processes // self.context.size

    @property
    def reader(self) -> int:
        """Index of this process, or of its group, among the readers."""
        return self.rank if self.context is None else self.rank // self.context.size

    def on_device(self, batch: Batch) -> Batch:
        """Copy a batch, or the slice of it that this process computes, to the device."""
        return batch.to(self.device) if self.context is None else self.context.part(batch, self.device)

    def sharding(self, parallel: ParallelConfig) -> Sharding | None:
        """Return the sharding of the model; None if every process has the full model."""
        sizes = mesh_sizes_of(parallel, self.processes, world().local_size)
        return None if sizes is None else Sharding(device_mesh(self.device.type, sizes), parallel)

    def sum_in_place(self, tensor: Tensor) -> None:
        """Sum a tensor of the device over all processes; the host does not wait."""
        if self.processes > 1:
            torch.distributed.all_reduce(tensor)

    def seed(self, seed: int) -> None:
        """Seed this process by its rank, so that dropout differs between processes."""
        torch.manual_seed(seed + self.rank)

    def leave(self) -> None:
        """End together with the other processes: for a launcher, an early exit with another code is a failure."""
        stop_watching()
        self.host_group.wait_for_all()
        if self.processes > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def peak_memory_bytes(self) -> int:
        """Return the peak memory of the device, or of the process on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def default_device() -> torch.device:
    """Return the device type of this machine."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine_notes(parallel: ParallelConfig, processes: int) -> Iterator[str]:
    """Yield notes if the number of processes does not fit the machine."""
    gpus, cores, local = torch.cuda.device_count(), len(os.sched_getaffinity(0)), world().local_size
    if gpus > local:
        yield f"{local} of {gpus} visible GPUs used; launch.num_processes=auto uses all"
    if not gpus and local > cores:
        yield (
            f"{local} processes share {cores} core{'s' * (cores > 1)}; more processes than cores are not "
            f"faster: launch.num_processes={cores}"
        )
    if parallel.divides and processes == 1:
        yield f"parallel={parallel.kind} has no effect with one process; launch.num_processes=auto uses all GPUs"


def start(launch: LaunchConfig, precision: str, seed: int, context: int = 1) -> Runtime:
    """Set threads and seed, connect all processes, and return the runtime; `context` processes share rows."""
    for name in _ACCELERATE_VARIABLES:
        os.environ.pop(name, None)
    here, cores = world(), len(os.sched_getaffinity(0))
    threads = launch.threads or max(1, cores // here.local_size)
    if here.is_joined:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # torch would warn if it is not set
        FailureFlag(here.rank).watch()  # another process may fail before it connects
    accelerator = _accelerator(joined=here.is_joined)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    # for numbers in CPU memory: NCCL would copy them to the device and back
    gloo = torch.distributed.new_group(backend="gloo", timeout=_TIMEOUT) if accelerator.num_processes > 1 else None
    host_group = HostGroup(accelerator.process_index, accelerator.num_processes, gloo)
    # cpu:0 is another device than cpu for torch, so tensors would be copied
    device = accelerator.device if accelerator.device.type != "cpu" else torch.device("cpu")
    group = context_group(context, host_group.count, host_group.rank)
    runtime = Runtime(accelerator, device, host_group, torch.get_num_threads(), group)
    runtime.seed(seed)
    return runtime


def _accelerator(*, joined: bool) -> Any:
    from accelerate import Accelerator, PartialState

    on_cpu = not torch.cuda.is_available()
    if joined:
        PartialState(cpu=on_cpu, backend="gloo" if on_cpu else "nccl", timeout=_TIMEOUT)  # connects the processes
        wait_until_connected()  # Accelerator clears the environment for a moment
    return Accelerator(
        cpu=on_cpu,  # without it, two processes on a machine without a GPU would each train alone
        mixed_precision="no",
        gradient_accumulation_steps=1,
    )


# ---- fake process group


_NUMBERS = count()


@contextmanager
def fake_device_mesh(sizes: MeshSizes) -> Iterator[DeviceMesh]:
    """Yield the device mesh of rank 0. The process group of a run is unchanged."""
    processes = sizes.replicate * sizes.shard
    has_own_group = dist.is_initialized()
    if not has_own_group:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    ranks = torch.arange(processes).view(sizes.replicate, sizes.shard)
    # Meshes with the same dimension names are equal, and DTensor caches results for equal meshes: tensors of a run
    # would be sent through the fake group. So every fake mesh has unique names.
    number = next(_NUMBERS)
    dimensions = {f"fake_shard_{number}": ranks[0]}
    if sizes.replicate > 1:
        dimensions = {f"fake_replicate_{number}": ranks[:, 0]} | dimensions
    groups = [
        # with local synchronization no other process needs to take part
        dist.new_group(members.tolist(), backend="fake", use_local_synchronization=True)
        for members in dimensions.values()
    ]
    try:
        yield DeviceMesh.from_group(
            groups if len(groups) > 1 else groups[0],
            "cpu",
            mesh=ranks if len(groups) > 1 else ranks[0],
            mesh_dim_names=tuple(dimensions),
        )
    finally:
        if has_own_group:
            for group in groups:
                dist.destroy_process_group(group)
        else:
            dist.destroy_process_group()
