"""Optimizer state in several files, one of each process that stepped a part of the weights, read by who steps what now.

States go by the names of parameters, so it does not matter how many processes there were, or whether there was one.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from torch.optim import Optimizer

from app.errors import CheckpointError
from app.optim.state import StateDict, load_nested, unflatten


def load_parts(optimizer: Optimizer, files: Sequence[Path], plains: Sequence[dict[str, Any]]) -> None:
    """Continue with what those files have of this optimizer's parameters; `plains` are their plain values."""
    own = optimizer.state_dict()["param_groups"]
    numbers = _numbers(own)
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    group_of: dict[str, Mapping[str, Any]] = {}
    first: Mapping[str, Any] = {}
    for file, plain in zip(files, plains, strict=True):
        groups = unflatten({}, plain)["param_groups"]
        first = first or groups[0]
        group_of |= {name: group for group in groups for name in group["param_names"]}
        renumbered = {was: numbers[name] for name, was in _numbers(groups).items() if name in numbers}
        values |= {new: plain[path] for path in plain if (new := _renumbered(path, renumbered)) is not None}
        with safe_open(file, framework="pt") as saved:
            paths = {path: _renumbered(path, renumbered) for path in saved.keys()}  # noqa: SIM118  no dictionary
            tensors |= {new: saved.get_tensor(path) for path, new in paths.items() if new is not None}
    _require_all(numbers, group_of)
    state = unflatten(tensors, values).get("state", {})
    load_nested(optimizer, {"state": state, "param_groups": [_group(each, group_of, first) for each in own]})


def _numbers(groups: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Of parameters, by which an optimizer's states go, by name."""
    return {
        name: number
        for group in groups
        for name, number in zip(group["param_names"], group["params"], strict=True)
    }


def _renumbered(path: str, numbers: Mapping[int, int]) -> str | None:
    """`state/3/exp_avg` with the new number; None for what is of no state here, as `state` alone is: it is empty."""
    kind, _, rest = path.partition("/")
    was, _, key = rest.partition("/")
    return f"state/{numbers[int(was)]}/{key}" if kind == "state" and was and int(was) in numbers else None


def _group(own: StateDict, group_of: Mapping[str, Mapping[str, Any]], first: Mapping[str, Any]) -> StateDict:
    """With the settings of the group that its parameters were in; what counts steps stands in the first one only."""
    saved = group_of[own["param_names"][0]]
    settings = {key: saved.get(key, first.get(key, own[key])) for key in own}
    return settings | {"params": own["params"], "param_names": own["param_names"]}


def _require_all(numbers: Mapping[str, int], saved: Mapping[str, Any]) -> None:
    missing = sorted(numbers.keys() - saved.keys())
    if missing:
        raise CheckpointError(
            f"resume: the checkpoint has no optimizer state of {missing[0]}, which this run trains; "
            "type model=, adapter= and optimizer= as in the run.yaml it belongs to, or another output_dir"
        )
