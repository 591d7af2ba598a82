"""Optimizer state as named tensors (for safetensors) and plain values (for JSON), and its allocation before step 1.

A name is the path through the nested dictionaries: `state/0/exp_avg`. A part of digits is an integer key.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from app.errors import CheckpointError
from app.optim.optimizers import ordinary, skips_on_device, step_unless

StateDict = dict[str, Any]


def flatten(state_dict: StateDict) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Flatten the state, sorted by name, so that equal states give equal files; do not copy tensors."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    _flatten_into(tensors, plain, "", state_dict)
    seen: set[int] = set()
    apart: dict[str, Tensor] = {}
    for name, tensor in sorted(tensors.items()):
        # safetensors refuses tensors that share memory: all 8-bit states share one quantization map
        address = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return apart, dict(sorted(plain.items()))


def unflatten(tensors: dict[str, Tensor], plain: dict[str, Any]) -> StateDict:
    """Invert `flatten`."""
    state_dict: StateDict = {}
    for path, value in [*tensors.items(), *((path, _decode(value)) for path, value in plain.items())]:
        *parents, last = (int(part) if part.isdigit() else part for part in path.split("/"))
        place: dict[Any, Any] = state_dict
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return state_dict


def load_state(optimizer: Optimizer, tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
    """Load a flat state. The optimizer keeps the tensors: do not use them again."""
    saved = unflatten(tensors, plain)
    both = (saved, optimizer.state_dict())
    names, expected = ([group["param_names"] for group in state["param_groups"]] for state in both)
    if names != expected:  # states are stored by position
        raise CheckpointError(
            "resume: the optimizer state in the checkpoint is for different trained parameters; "
            "set model=, adapter= and optimizer= as in its run.yaml, or use another output_dir"
        )
    if getattr(ordinary(optimizer), "is_paged", False):
        _load_paged(optimizer, saved)
    else:
        optimizer.load_state_dict(saved)


def named_states(optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return the states of each parameter by name; tensors are not copied."""
    return {
        name: optimizer.state[parameter]
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        if parameter in optimizer.state
    }


def saved_names(plain: Mapping[str, Any]) -> dict[str, str]:
    """Return parameter names by the numbered paths of a flat state."""
    return {
        f"state/{number}": name
        for group in _decode(plain.get("param_groups", []))  # none in a sharded checkpoint
        for number, name in zip(group["params"], group["param_names"], strict=True)
    }


def _flatten_into(tensors: dict[str, Tensor], plain: dict[str, Any], path: str, value: Any) -> None:
    if isinstance(value, Tensor):
        tensors[path] = value.detach().contiguous()
    elif isinstance(value, dict) and value:
        for key, inner in value.items():
            assert isinstance(key, int) or not (key.isdigit() or "/" in key), key
            _flatten_into(tensors, plain, f"{path}/{key}" if path else str(key), inner)
    else:
        plain[path] = _encode(value)


def _encode(value: Any) -> Any:
    """Convert to JSON, which has no tuples and only text as keys."""
    if isinstance(value, tuple):
        return {"tuple": [_encode(item) for item in value]}
    if isinstance(value, list):
        return [_encode(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[_encode(key), _encode(item)] for key, item in value.items()]}
    assert value is None or isinstance(value, bool | int | float | str), type(value)
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, dict):
        if "tuple" in value:
            return tuple(_decode(item) for item in value["tuple"])
        return {_decode(key): _decode(item) for key, item in value["dict"]}
    return value


def _load_paged(optimizer: Optimizer, saved: StateDict) -> None:
    """Load into paged memory: bitsandbytes loads into device memory, where paged states may not fit."""
    paged: Any = ordinary(optimizer)
    optimizer.load_state_dict(saved, move_to_device=False)  # type: ignore[call-arg]
    with torch.no_grad():
        for parameter, state in optimizer.state.items():
            for key in state.keys() & {"state1", "state2"}:
                buffer = paged.get_state_buffer(parameter, dtype=state[key].dtype)
                state[key] = buffer.copy_(state[key])
    paged.to_gpu()


def allocate_states(optimizer: Optimizer) -> int:
    """Allocate the states of the first step, to check that they fit; return the number of parameters with states.

    Parameters do not change; those that get a state have a zero gradient. bitsandbytes has a method for this. Others
    take a step that changes nothing: with a learning rate of zero nothing decays or is added, and with zero gradients
    no zero changes its sign. `drop_states` frees the states, and the first step allocates them again.
    """
    inner: Any = ordinary(optimizer)
    groups = [dict(group) for group in optimizer.param_groups]
    # a OneByOne steps one parameter at a time: its copies must fit too
    if callable(getattr(inner, "init_state", None)) and (inner is optimizer or inner.is_paged):
        _initialize(inner)
    elif skips_on_device(optimizer):
        step_unless(optimizer, torch.ones((), device=groups[0]["params"][0].device))
    else:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        group.clear()  # apex counts steps there
        group.update(before)  # so this step is not counted
    return len(optimizer.state)


def drop_states(optimizer: Optimizer) -> None:
    """Free the states of `allocate_states`, except paged states, which bitsandbytes keeps."""
    for parameter in list(optimizer.state):
        if not any(getattr(value, "is_paged", False) for value in optimizer.state[parameter].values()):
            del optimizer.state[parameter]


@torch.no_grad()
def _initialize(optimizer: Any) -> None:
    for at, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if not optimizer.state[parameter]:
                optimizer.init_state(group, parameter, at, place)
