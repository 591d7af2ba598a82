"""Merged adapters: one adapter into each weight of its base, or several LoRA adapters into one.

Several adapters become one with all of their columns, with fewer by a singular value decomposition, or by PEFT's
`linear`.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from app.adapters.adapters import quiet_peft, read_adapter_config
from app.base.weight_files import StoredTensor, adapter_weights, in_peft, tensors_of_file, without_peft
from app.config.adapters import ADAPTER, ADAPTER_WEIGHTS, METHODS
from app.errors import CheckpointError, ConfigError
from app.layers.quantization import is_conv1d

_ROWS = ".token_adapter.trainable_tokens_delta"  # ends the names of trained rows of an embedding or a head


def read_updates(final: Path, lm: Any = None) -> dict[str, Callable[[Tensor], Tensor]]:
    """What makes of each adapted layer's weight [out, in] the one with its adapter, by full names of the layers.

    Refuses adapters with anything that cannot be merged so. `lm`: the structure of the base, for the shapes of all
    layers where they share tensors of the adapter.
    """
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    config = read_adapter_config(final)
    known = METHODS.get(config["peft_type"])
    if known is not None and not known.merges:
        raise CheckpointError(
            f"kind=merged: {config['peft_type']} cannot be merged one weight at a time. Set kind=adapter."
        )
    mark = f".{PEFT_TYPE_TO_TUNER_MAPPING[config['peft_type']].prefix}"  # before the names of a method's own tensors
    parts: dict[str, dict[str, Tensor]] = {}
    shared: dict[str, Tensor] = {}
    updates: dict[str, Callable[[Tensor], Tensor]] = {}
    for full, tensor in adapter_weights(final).items():
        name = without_peft(full)
        layer, is_own, _ = name.partition(mark)
        if name == full:
            shared[full] = tensor
        elif is_own and not (known is not None and known.of_norms and name.endswith(".bias")):
            parts.setdefault(layer, {})[full] = tensor
        elif name.endswith(_ROWS):
            layer = name.removesuffix(_ROWS)
            ids = next(ids for name, ids in config["trainable_token_indices"].items() if layer.endswith(name))
            updates[layer] = partial(_with_rows, rows=tensor, ids=ids)
        elif not _is_whole(name, config):
            raise CheckpointError(
                f"kind=merged: merging the tensor {full} of the adapter in {final} is not supported. Set kind=adapter "
                "to export it unchanged."
            )
    if shared:
        layers = {layer: lm.get_submodule(layer) for layer in parts}
        shapes = {n: each.weight.shape[::-1] if is_conv1d(each) else each.weight.shape for n, each in layers.items()}
        weights = {layer: torch.zeros(1).expand(shape) for layer, shape in shapes.items()}  # which take no memory
        whole = {name: each for own in (shared, *parts.values()) for name, each in own.items()}
        network = _attached(weights, config, whole)
        return updates | {layer: partial(_merged_in, network.get_submodule(in_peft(layer))) for layer in parts}
    return updates | {layer: partial(_merged, layer=layer, config=config, parts=own) for layer, own in parts.items()}


def _merged_in(module: Any, weight: Tensor) -> Tensor:
    """The weight of a layer that shares tensors with others, in fp32: PEFT merges this one alone."""
    layer, without = module.get_base_layer(), module.get_base_layer().weight
    layer.weight = nn.Parameter(weight.to("cpu", torch.float32, copy=True), requires_grad=False)
    module.merge()
    merged: Tensor = layer.weight.detach()
    layer.weight, module.merged_adapters = without, []
    return merged


def _merged(weight: Tensor, layer: str, config: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Tensor:
    """The weight [out, in] of a layer, or the stack [experts, out, in], with its adapter, in fp32: PEFT merges a model
    of this layer alone.
    """
    if weight.ndim == 3:
        return _merged_stack(weight, layer, config, parts)
    patterns = {  # PEFT warns of names of other layers
        key: {name: each for name, each in config[key].items() if f".{layer}".endswith(f".{name}")}
        for key in ("rank_pattern", "alpha_pattern")
        if config.get(key)
    }
    with quiet_peft():
        network = _attached({layer: weight.to(torch.float32, copy=True)}, {**config, **patterns}, parts)
        result: Tensor = network.merge_and_unload().get_submodule(layer).weight.detach()
    return result


def _merged_stack(stack: Tensor, layer: str, config: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Tensor:
    """A stack of experts with its LoRA: A has them as the slow index, B as the fast one."""
    a, b = (parts[in_peft(f"{layer}.lora_{half}.weight")].to(stack.device, torch.float32) for half in "AB")
    a, b = a.unflatten(0, (len(stack), -1)), b.unflatten(1, (-1, len(stack))).permute(2, 0, 1)
    r = a.shape[1]
    scale = config["lora_alpha"] / (r**0.5 if config["use_rslora"] else r)
    return torch.baddbmm(stack.float(), b, a, alpha=scale)


def _attached(weights: Mapping[str, Tensor], config: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Any:
    """PEFT's model of some layers alone, by their weights, with their adapter."""
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING, get_peft_model, set_peft_model_state_dict

    lm = nn.Module()
    for layer, weight in weights.items():
        with torch.device("meta"):
            rows, columns = len(weight), weight.shape[-1]
            is_norm = weight.ndim == 1
            module = nn.LayerNorm(rows, bias=False) if is_norm else nn.Linear(columns, rows, bias=False)
        module.weight = nn.Parameter(weight, requires_grad=False)
        place, _, last = layer.rpartition(".")
        inside = lm
        for part in place.split(".") if place else ():
            if not hasattr(inside, part):
                inside.add_module(part, nn.Module())
            inside = inside.get_submodule(part)
        inside.add_module(last, module)
    own: dict[str, Any] = {
        "task_type": None,
        "modules_to_save": None,
        "trainable_token_indices": None,
        "target_parameters": None,
        "ensure_weight_tying": False,
    }
    own |= {"fan_in_fan_out": False, "inference_mode": False, "base_model_name_or_path": None}
    settings = PEFT_TYPE_TO_CONFIG_MAPPING[config["peft_type"]].from_peft_type(
        **{key: own.get(key, value) for key, value in config.items()}
    )
    with quiet_peft():
        network = get_peft_model(lm, settings)
        found = set_peft_model_state_dict(network, dict(parts))
    assert not found.unexpected_keys, found.unexpected_keys
    return network


def _with_rows(weight: Tensor, rows: Tensor, ids: list[int]) -> Tensor:
    return weight.float().index_copy(0, torch.tensor(ids, device=weight.device), rows.to(weight.device, torch.float32))


def fully_trained_weights(final: Path) -> dict[str, StoredTensor]:
    """Weights that the adapter replaces as a whole, by their names in the model."""
    config = read_adapter_config(final)
    stored = tensors_of_file(final / ADAPTER_WEIGHTS)
    return {without_peft(name): each for name, each in stored.items() if _is_whole(name, config)}


def _is_whole(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a weight belongs to a module that was trained as a whole, or to one that is tied to such a module."""
    whole, plain = config.get("modules_to_save") or (), f".{without_peft(name)}"
    is_tied = config.get("ensure_weight_tying") and not any(mark in plain for mark in (".lora_", ".token_adapter."))
    return bool(is_tied) or any(f".{each}." in plain for each in whole)


# ---- combination


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
                f"adapters: {self.given} has more than A and B of LoRA (a head, tokens, stacked experts or another "
                "method), which cannot be combined. Merge it with kind=merged."
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
        raise ConfigError("combine=linear: the adapters have different ranks. Set combine=cat, which takes any rank.")
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
                f"adapters: the shapes of {layer} differ, so the adapters have different bases. Leave one out."
            )
        a, b = _cat(pairs, None)
        found[layer] = COMBINATIONS[how](pairs, rank)
        apart += _norm(torch.cat([found[layer][0], a]), torch.cat([found[layer][1], -b], dim=1)) ** 2
        whole += _norm(a, b) ** 2
    highest = max(len(a) for a, _ in found.values())
    if rank is not None and rank > highest:
        raise ConfigError(
            f"rank={rank}: the adapters have a total rank of {highest}, exact without rank=. Leave it out."
        )
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
