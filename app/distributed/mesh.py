"""How the processes of a run are arranged: copies of the model, and the processes that each copy is divided among."""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from app.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Arrangement:
    """`replicate` copies, each divided among `shard` processes."""

    replicate: int
    shard: int


def arrangement(
    kind: str, shard: int | None, replicate: int | None, processes: int, local: int
) -> Arrangement:
    """`None`: fsdp divides among all processes, hsdp among those of a machine (`local`)."""
    if shard is None:
        shard = processes // replicate if replicate else (local if kind == "hsdp" else processes)
    if replicate is None:
        replicate = max(1, processes // shard) if shard else 1
    if shard * replicate != processes:
        raise ConfigError(
            f"parallel.shard={shard} parallel.replicate={replicate}: {shard} x {replicate} is not {processes}, the "
            f"number of processes. Set parallel.shard to a divisor of {processes}, or leave both at auto."
        )
    return Arrangement(replicate, shard)


def device_mesh(device_type: str, arranged: Arrangement) -> DeviceMesh:
    """One dimension, or two where there are copies."""
    if arranged.replicate == 1:
        return init_device_mesh(device_type, (arranged.shard,), mesh_dim_names=("shard",))
    sizes = (arranged.replicate, arranged.shard)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("replicate", "shard"))
