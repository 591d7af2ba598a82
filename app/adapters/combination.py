"""Several LoRA adapters of one base as one: all of their columns, fewer by a singular value decomposition, or PEFT's
`linear`.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from app.adapters.adapters import read_adapter_config
from app.base.names import without_peft
from app.base.safetensors_files import adapter_weights
from app.config.adapters import ADAPTER, ADAPTER_WEIGHTS
from app.errors import ConfigError

_HALF = {half: f".lora_{half}.weight" for half in ("A", "B")}


@dataclass(frozen=True, slots=True)
class Member:
    """One adapter: its folder, and the factor of its update."""

    given: str
    folder: Path
    factor: float

    def halves(self) -> dict[str, tuple[float, Tensor, Tensor]]:
        """The factor of B A, with the scale of the adapter, and A and B in float64, by layer; refused where the adapter
        is more than that.
        """
        config = read_adapter_config(self.folder)
        tensors = adapter_weights(self.folder)
        layers = sorted({name.removesuffix(end) for name in tensors for end in _HALF.values() if name.endswith(end)})
        is_plain = config["peft_type"] == "LORA" and not config.get("target_parameters")
        if not is_plain or 2 * len(layers) != len(tensors):
            raise ConfigError(
                f"adapters: {self.given} is more than A and B of LoRA (a head, tokens, stacks of experts or another "
                "method), which has no weighted sum here. Merge it with kind=merged."
            )
        found = {}
        for layer in layers:
            a, b = (tensors[layer + _HALF[half]].double() for half in ("A", "B"))
            found[layer] = self.factor * _scale(config, layer, len(a)), a, b
        return found


def _scale(config: Mapping[str, Any], layer: str, rank: int) -> float:
    """The scale of a layer's update, as PEFT computes it."""
    from peft.utils.other import get_pattern_key

    by_layer = config.get("alpha_pattern") or {}
    alpha = float(by_layer.get(get_pattern_key(by_layer.keys(), layer), config["lora_alpha"]))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


Pairs = Sequence[tuple[float, Tensor, Tensor]]  # of a layer: factor, A and B of each member


def _cat(pairs: Pairs, _rank: int | None) -> tuple[Tensor, Tensor]:
    """The sum of the updates, exactly: ranks add up."""
    return torch.cat([a for _, a, _ in pairs]), torch.cat([factor * b for factor, _, b in pairs], dim=1)


def _svd(pairs: Pairs, rank: int | None) -> tuple[Tensor, Tensor]:
    """The nearest matrix of a rank to the sum of the updates, without making that sum."""
    a, b = _cat(pairs, None)
    (q_b, r_b), (q_a, r_a) = torch.linalg.qr(b), torch.linalg.qr(a.T)
    u, s, v = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    return (q_a @ v[:rank].T).T, q_b @ (u[:, :rank] * s[:rank])


def _linear(pairs: Pairs, _rank: int | None) -> tuple[Tensor, Tensor]:
    """PEFT's `linear`: A and B are summed apart, each with the root of the factor, so that they mix."""
    if len({a.shape for _, a, _ in pairs}) > 1:
        raise ConfigError("combine=linear: the adapters have other ranks. combine=cat sums adapters of any rank.")
    roots = [math.sqrt(abs(factor)) for factor, _, _ in pairs]
    a = sum(math.copysign(root, pair[0]) * pair[1] for root, pair in zip(roots, pairs, strict=True))
    b = sum(root * pair[2] for root, pair in zip(roots, pairs, strict=True))
    assert isinstance(a, Tensor)
    assert isinstance(b, Tensor)
    return a, b


COMBINATIONS: dict[str, Callable[[Pairs, int | None], tuple[Tensor, Tensor]]] = {
    "cat": _cat,
    "svd": _svd,
    "linear": _linear,
}


def combine(members: Sequence[Member], how: str, rank: int | None, target: Path) -> tuple[int, float]:
    """Write an adapter that sums `members`, with the other settings of the one whose file is there; returns its rank,
    and the relative difference of all its updates from the weighted sum.
    """
    of_members = [member.halves() for member in members]
    found: dict[str, tuple[Tensor, Tensor]] = {}
    apart = whole = 0.0
    for layer in sorted(set().union(*of_members)):
        pairs = [own[layer] for own in of_members if layer in own]
        if len({(a.shape[1], b.shape[0]) for _, a, b in pairs}) > 1:
            raise ConfigError(
                f"adapters: they have {layer} in other shapes, so they are of other bases. Leave one out."
            )
        a, b = _cat(pairs, None)
        found[layer] = COMBINATIONS[how](pairs, rank)
        apart += _norm(torch.cat([found[layer][0], a]), torch.cat([found[layer][1], -b], dim=1)) ** 2
        whole += _norm(a, b) ** 2
    highest = max(len(a) for a, _ in found.values())
    if rank is not None and rank > highest:
        raise ConfigError(f"rank={rank}: together the adapters have rank {highest}, exact without rank=. Leave it out.")
    tensors = {}
    for layer, (a, b) in found.items():  # layers that some members leave out have fewer columns
        more = highest - len(a)
        tensors[layer + _HALF["A"]] = torch.nn.functional.pad(a, (0, 0, 0, more)).float().contiguous()
        tensors[layer + _HALF["B"]] = torch.nn.functional.pad(b, (0, more)).float().contiguous()
    save_file(tensors, target / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    _write_config(set(found), highest, target / ADAPTER)
    return highest, math.sqrt(apart / whole) if whole else 0.0


def _norm(a: Tensor, b: Tensor) -> float:
    """The Frobenius norm of B A, without making it."""
    return float((torch.linalg.qr(b)[1] @ torch.linalg.qr(a.T)[1].T).norm())


def _write_config(layers: set[str], rank: int, file: Path) -> None:
    """The settings of another adapter, for these layers and a scale of one."""
    config = json.loads(file.read_text())
    names = set(map(without_peft, layers))
    config |= {"r": rank, "lora_alpha": rank, "target_modules": sorted(names)}
    config |= {"use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}, "init_lora_weights": True}
    file.write_text(json.dumps(config, indent=2, sort_keys=True))
