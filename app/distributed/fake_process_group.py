"""A device mesh of one process of many that are not there: torch's fake process group, whose collectives do nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore  # its import registers the backend

from app.distributed.fsdp import MeshSizes


@contextmanager
def fake_device_mesh(sizes: MeshSizes) -> Iterator[DeviceMesh]:
    """The mesh as rank 0 sees it. A run's own process group stays as it is."""
    processes = sizes.replicate * sizes.shard
    has_own_group = dist.is_initialized()
    if not has_own_group:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    ranks = torch.arange(processes).view(sizes.replicate, sizes.shard)
    dimensions = {"replicate": ranks[:, 0], "shard": ranks[0]} if sizes.replicate > 1 else {"shard": ranks[0]}
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
