"""A device mesh of one process of many that are not there: torch's fake process group, whose collectives do nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore  # its import registers the backend

from app.distributed.fsdp import MeshSizes

_NUMBERS = count()


@contextmanager
def fake_device_mesh(sizes: MeshSizes) -> Iterator[DeviceMesh]:
    """The mesh as rank 0 sees it. A run's own process group stays as it is."""
    processes = sizes.replicate * sizes.shard
    has_own_group = dist.is_initialized()
    if not has_own_group:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    ranks = torch.arange(processes).view(sizes.replicate, sizes.shard)
    # Meshes with the same names of dimensions are equal, and DTensor caches what it did with an equal one: a run's own
    # tensors would be sent through the fake group. So every fake mesh has names of its own.
    number = next(_NUMBERS)
    dimensions = {f"fake_shard_{number}": ranks[0]}
    if sizes.replicate > 1:
        dimensions = {f"fake_replicate_{number}": ranks[:, 0]} | dimensions
    groups = [
        # with local synchronization no other process has to take part
        dist.new_group(each.tolist(), backend="fake", use_local_synchronization=True)
        for each in dimensions.values()
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
