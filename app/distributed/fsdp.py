"""Weights, gradients and optimizer states sharded by torch's FSDP2 (`fully_shard`), over a device mesh.

Each repeated layer is a unit whose weights are all-gathered for its computation; modules outside of layers (embeddings,
last norm, head) are the root unit. 4-bit weights are sharded as bytes; each process keeps all of their scales.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from app.config.schema import ParallelConfig
from app.errors import ConfigError

_MAX_COMPARED_WEIGHTS = 1 << 22  # of a tensor whose gradient is compared


@dataclass(frozen=True, slots=True)
class MeshSizes:
    """`replicate` copies of a model, each sharded among `shard` processes."""

    replicate: int
    shard: int


def mesh_sizes_of(parallel: ParallelConfig, processes: int, local_processes: int) -> MeshSizes | None:
    """Return the mesh; None if every process has the full model. `auto`: fsdp shards over all, hsdp over a machine."""
    if not parallel.divides or processes == 1:
        return None
    shard, replicate = (None if size == "auto" else int(size) for size in (parallel.shard, parallel.replicate))
    if shard is None:
        shard = processes // replicate if replicate else (local_processes if parallel.kind == "hsdp" else processes)
    if replicate is None:
        replicate = max(1, processes // shard) if shard else 1
    if shard * replicate != processes:
        raise ConfigError(
            f"parallel.shard={shard} parallel.replicate={replicate}: {shard} x {replicate} is not the number of "
            f"processes, {processes}. Set parallel.shard to a divisor of {processes}, or both to auto."
        )
    return MeshSizes(replicate, shard)


def device_mesh(device_type: str, sizes: MeshSizes) -> DeviceMesh:
    """Return a mesh with one dimension, or two with replicas."""
    if sizes.replicate == 1:
        return init_device_mesh(device_type, (sizes.shard,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (sizes.replicate, sizes.shard), mesh_dim_names=("replicate", "shard"))


class Sharding:
    """The sharding of one model.

    `parallel.reshard`: free gathered weights between forward and backward; `sync=each`: reduce-scatter the gradients of
    each micro-batch, so that they are sharded at all times; `offload`: keep shards in CPU RAM.
    """

    def __init__(self, mesh: DeviceMesh, parallel: ParallelConfig) -> None:
        self.mesh = mesh
        self._reshard = parallel.reshard
        self._sync_each = parallel.sync == "each"
        self._offload = parallel.offload
        self._root: FSDPModule
        self.units: list[FSDPModule] = []

    def divide(self, model: nn.Module, layers: Sequence[nn.Module], entries: Sequence[str]) -> None:
        """Shard `model` in place. `entries`: its methods, besides forward, that start a pass."""
        offload = CPUOffloadPolicy(pin_memory=self.mesh.device_type == "cuda") if self._offload else OffloadPolicy()
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in layers:
            fully_shard(
                layer, mesh=self.mesh, reshard_after_forward=self._reshard, mp_policy=policy, offload_policy=offload
            )
        self._root = fully_shard(model, mesh=self.mesh, mp_policy=policy, offload_policy=offload)
        self.units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in self.units:  # sums: the loss is already divided by the weight of all processes
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        for name in entries:
            register_fsdp_forward_method(model, name)

    @torch.no_grad()
    def put(self, module: nn.Module, name: str, tensor: Any) -> None:
        """Fill the rows of this process in a parameter sharded on meta, from `tensor.rows(low, high)`.

        The parameter is replaced; FSDP uses the new one from its first pass.
        """
        parameter = module._parameters[name]
        assert parameter is not None
        device = "cpu" if self._offload else self.mesh.device_type
        sharded = torch.empty_like(parameter, device=device)
        shard = local(sharded)
        if shard.numel():
            rows = own_rows(sharded)
            shard.copy_(tensor.rows(rows.start, rows.stop))
        module._parameters[name] = nn.Parameter(sharded, requires_grad=parameter.requires_grad)

    def begin_step(self) -> None:
        """Set the reduction of gradients: after each micro-batch, or only with the last one of the step."""
        self._root.set_requires_gradient_sync(self._sync_each)

    def expect_last(self) -> None:
        """Reduce gradients in the next backward pass, the last of the step."""
        self._root.set_requires_gradient_sync(True)

    def at_rest(self) -> None:
        """Free gathered weights after passes without a step, so that modules have their shards as parameters."""
        for unit in self.units:
            unit.reshard()

    def forget_gradients(self) -> None:
        """Drop all gradients, also unsharded ones of incomplete passes, which would be added to the next ones."""
        for unit in self.units:
            unit.unshard()
            _module(unit).zero_grad(set_to_none=True)
            unit.reshard()

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Allow backward passes that do not start from a forward pass of the model, on all processes.

        After an error nothing is put back: gathering weights would wait for processes that may not take part.
        """
        self._root.set_requires_gradient_sync(False)
        self._root.set_reshard_after_backward(False, recurse=False)
        yield
        self._root.set_reshard_after_backward(True)
        self._root.set_requires_gradient_sync(True)
        self.forget_gradients()

    def first_gradient(self, backward: Callable[[], None]) -> tuple[str, Tensor, Tensor]:
        """Return a small gradient of one layer: its name, the gradient reduced by FSDP, and the sum over all processes.

        `backward`: a forward and a backward pass of all processes.
        """
        sharded, gathered = self._trained_of_one_unit()
        gradients: dict[str, Tensor] = {}
        hooks = [weight.register_hook(partial(_store_gradient, gradients, name)) for name, weight in gathered.items()]
        backward()
        for hook in hooks:
            hook.remove()
        for name in gathered:  # adapters start with zeros, so half of their gradients are zero
            expected = gradients.get(name, torch.zeros(sharded[name].shape, device=self.mesh.device_type))
            torch.distributed.all_reduce(expected)
            if expected.any():
                break
        reduced = sharded[name].grad
        assert reduced is not None, name
        on_device = reduced.to(self.mesh.device_type)  # gradients of offloaded shards are in CPU RAM
        assert isinstance(on_device, DTensor)
        whole = on_device.full_tensor()
        for parameter in _module(self._root).parameters():
            parameter.grad = None
        return name, whole, expected

    def _trained_of_one_unit(self) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
        """Return trained weights of the last layer that has any: all, sharded; small ones, gathered, smallest first."""
        for unit in reversed(self.units):
            module = _module(unit)
            unit.reshard()
            sharded = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
            unit.unshard()
            gathered = {name: weight for name, weight in module.named_parameters() if name in sharded}
            unit.reshard()
            names = sorted(
                (name for name, weight in gathered.items() if not is_sharded(weight)), key=lambda n: sharded[n].numel()
            )
            small = [name for name in names if sharded[name].numel() <= _MAX_COMPARED_WEIGHTS] or names[:1]
            if small:
                return sharded, {name: gathered[name] for name in small}
        raise AssertionError("nothing is trained")

    @contextmanager
    def gathered(self, module: nn.Module) -> Iterator[None]:
        """Gather the weights of a module on all processes, inside a pass of the model, which gathers the root."""
        layers = (layer for layer in self.units if layer is not self._root)
        unit = next((layer for layer in layers if any(module is inner for inner in _module(layer).modules())), None)
        if unit is None:
            yield
            return
        unit.unshard()
        try:
            yield
        finally:
            unit.reshard()

    def total(self, squares: Tensor) -> Tensor:
        """Sum over the processes of one replica of the model; other replicas have the same sum."""
        on_device = squares.to(self.mesh.device_type)  # a GPU process group cannot sum offloaded shards
        torch.distributed.all_reduce(on_device, group=self.mesh.get_group(self.mesh.ndim - 1))
        return on_device.to(squares.device)


def _store_gradient(gradients: dict[str, Tensor], name: str, gradient: Tensor) -> None:
    gradients[name] = gradient.detach().float().clone()


def whole_tensors(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors in CPU memory, gathered one at a time by all processes together."""
    for name, tensor in state.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield name, whole.detach().to("cpu")


def _module(unit: FSDPModule) -> nn.Module:
    assert isinstance(unit, nn.Module)
    return unit


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor, of which this process has a shard."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the shard of this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def has_dtensor(types: Iterable[type]) -> bool:
    """Return whether an argument of an operation is a DTensor."""
    return DTensor in types


def own_rows(tensor: Tensor) -> slice:
    """Return the rows of the full tensor that this process has."""
    if not isinstance(tensor, DTensor):
        return slice(None)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return slice(offset[0], offset[0] + shape[0])


def first_number(tensor: Tensor) -> int:
    """Return the index in the flattened full tensor of the first number of this process."""
    rows = own_rows(tensor)
    return (rows.start or 0) * (tensor.numel() // len(tensor)) if tensor.ndim else 0


def like_shard(tensor: Tensor, shard: Tensor) -> Tensor:
    """Return a local tensor with the shape of the local part of `shard` as a DTensor with the same sharding."""
    if not isinstance(shard, DTensor):
        return tensor
    return DTensor.from_local(
        tensor, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
    )


def shard_of(tensor: DTensor) -> str:
    """Return rank and number of shards, for names of states that cannot be resharded."""
    mesh = tensor.device_mesh
    return f"{mesh.get_local_rank(mesh.ndim - 1)}.{mesh.size(mesh.ndim - 1)}"
