"""Tensors of a checkpoint: trained weights and optimizer states by name, whole or sharded.

A checkpoint of an unsharded model is two safetensors files, of a sharded one a folder of torch's DCP. Either is read by
any number of processes, except 8-bit optimizer states, whose blocks cannot be resharded.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from app.base.names import without_optimizer
from app.distributed import sharded_checkpoint
from app.distributed.fsdp import is_sharded, like_shard, local, own_rows, shard_of
from app.distributed.process_group import HostGroup
from app.errors import CheckpointError
from app.optim.optimizer_state import named_states, saved_names
from app.optim.stochastic_rounding import STEPS_ROUNDED
from app.training.train_step import Stepper

WEIGHTS, OPTIMIZER, SHARDS = "weights.safetensors", "optimizer.safetensors", "shards"
_PER_PROCESS_MARK = "@"


def named_tensors(stepper: Stepper) -> dict[str, Tensor]:
    """Tensors to save, as `weights/NAME` and `states/NAME/KEY`."""
    trained = stepper.model.trained()
    found: dict[str, Tensor] = {f"weights/{name}": each.detach() for name, each in trained.items()}
    for name, states in _states(stepper).items():
        tensors = ((key, value) for key, value in states.items() if isinstance(value, Tensor))
        for key, value in tensors:
            suffix, tensor = _portable(value, trained[name])
            found[f"states/{name}/{key}{suffix}"] = tensor
    return found


def _portable(value: Tensor, parameter: nn.Parameter) -> tuple[str, Tensor]:
    """Name suffix and tensor: sharded like its parameter where the shapes agree, else of this rank only."""
    if not is_sharded(parameter) or is_sharded(value) or value.ndim == 0:
        return "", value
    if value.shape == local(parameter).shape:
        return "", like_shard(value, parameter)
    return f"{_PER_PROCESS_MARK}{shard_of(parameter)}", value


def plain_states(stepper: Stepper) -> dict[str, Any]:
    """Optimizer states that are plain numbers, and the count of steps with stochastic rounding."""
    numbers = {
        f"{name}/{key}": value
        for name, states in _states(stepper).items()
        for key, value in states.items()
        if isinstance(value, int | float)
    }
    group = stepper.optimizer.param_groups[0]
    return numbers | ({STEPS_ROUNDED: group[STEPS_ROUNDED]} if STEPS_ROUNDED in group else {})


def load_sharded(folder: Path, plain: Mapping[str, Any], stepper: Stepper, host_group: HostGroup) -> None:
    """Load where the checkpoint, this run or both are sharded."""
    if not stepper.optimizer.state:
        stepper.allocate_states()
    wanted = named_tensors(stepper)
    shards = folder / SHARDS
    if shards.is_dir():
        _require_names(folder, wanted, sharded_checkpoint.names_in(shards), host_group)
        sharded_checkpoint.load(wanted, shards, host_group.group)
        numbers = dict(plain)
    else:
        names = {place: without_optimizer(name) for place, name in saved_names(plain).items()}
        numbers = _renamed(plain, names)
        _load_rows(folder, names, wanted, host_group)
    for name, states in _states(stepper).items():
        states |= {key: numbers[f"{name}/{key}"] for key in states if f"{name}/{key}" in numbers}
    if STEPS_ROUNDED in numbers:
        stepper.optimizer.param_groups[0][STEPS_ROUNDED] = numbers[STEPS_ROUNDED]


def load_weights(folder: Path, trained: Mapping[str, nn.Parameter], host_group: HostGroup) -> None:
    """Load the trained weights of a checkpoint into the parameters of the same names."""
    wanted: dict[str, Tensor] = {f"weights/{name}": each.detach() for name, each in trained.items()}
    shards = folder / SHARDS
    if shards.is_dir():
        sharded_checkpoint.load(wanted, shards, host_group.group)
        return
    with safe_open(folder / WEIGHTS, framework="pt") as saved, torch.no_grad():
        names = set(saved.keys())
        if names != trained.keys():
            odd = sorted(names ^ trained.keys())[:3]
            raise CheckpointError(f"{folder} has other weights than this run trains (for instance {', '.join(odd)}).")
        for name, parameter in trained.items():
            _copy_rows(saved, name, parameter.detach())


def _states(stepper: Stepper) -> dict[str, dict[str, Any]]:
    """Optimizer states by the names of trained weights."""
    found = named_states(stepper.optimizer)
    return {without_optimizer(name): states for name, states in found.items()}


def _require_names(folder: Path, wanted: Mapping[str, Tensor], have: set[str], host_group: HostGroup) -> None:
    """Refuse missing tensors on all ranks together: each checks its own shards."""
    missing = sorted({name for each in host_group.all_gather_object(sorted(wanted.keys() - have)) for name in each})
    if not missing:
        return
    saved_by = {name.rpartition(".")[2] for name in have if _PER_PROCESS_MARK in name} or {"1"}
    if any(_PER_PROCESS_MARK in name for name in (*missing, *have)):
        raise CheckpointError(
            f"resume: {folder} has optimizer states in blocks of 8 bits, which cannot be divided anew. Continue with "
            f"as many processes as it was saved by ({', '.join(saved_by)}) and the same parallel=, or give another "
            "output_dir and begin again with optimizer=adamw, whose states any number of processes continues."
        )
    raise CheckpointError(f"{folder} has other weights than this run trains (for instance {missing[0]}).")


def _load_rows(folder: Path, names: Mapping[str, str], wanted: Mapping[str, Tensor], host_group: HostGroup) -> None:
    """Read this rank's rows from files of whole tensors."""
    with (
        safe_open(folder / WEIGHTS, framework="pt") as weights,
        safe_open(folder / OPTIMIZER, framework="pt") as states,
    ):
        found = {f"weights/{name}": (weights, name) for name in weights.keys()}  # noqa: SIM118  no dictionary
        for path in states.keys():  # noqa: SIM118
            place, key = _split_path(path)
            found[f"states/{names.get(place, place)}/{key}"] = (states, path)
        _require_names(folder, wanted, set(found), host_group)
        for name, tensor in wanted.items():
            _copy_rows(*found[name], tensor)


def _split_path(path: str) -> tuple[str, str]:
    """Split into `state/3` and the last part: bitsandbytes has a dictionary between them."""
    parts = path.split("/")
    return "/".join(parts[:2]), parts[-1]


@torch.no_grad()
def _copy_rows(saved: Any, name: str, tensor: Tensor) -> None:
    own = local(tensor)
    if tensor.ndim == 0:
        own.copy_(saved.get_tensor(name))
    elif own.numel():
        rows = saved.get_slice(name)
        if tuple(rows.get_shape()) != tuple(tensor.shape):
            raise CheckpointError(
                f"resume: {name} of the checkpoint has shape {rows.get_shape()}, not that of this run."
            )
        own.copy_(rows[own_rows(tensor)])


def _renamed(plain: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Rename the numbers of a flat state from parameter indices to parameter names."""
    split = [(*_split_path(path), value) for path, value in plain.items()]
    found = {f"{names[place]}/{key}": value for place, key, value in split if place in names}
    rounded = {key: value for _, key, value in split if key == STEPS_ROUNDED}
    return found | rounded
