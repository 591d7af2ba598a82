"""Merged adapters: one adapter into the weights of its base, or several LoRA adapters into one.

Several adapters are combined by concatenation, by singular value decomposition to a lower rank, by PEFT's `linear`, or
by PEFT itself if the method prunes them first (TIES, DARE).
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

_ROWS = ".token_adapter.trainable_tokens_delta"  # name suffix of trained rows of an embedding or head


def read_updates(final: Path, lm: Any = None) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return functions that merge the adapter into a layer's weight [out, in], by full layer name.

    Refuse adapters with tensors that cannot be merged. `lm`: the structure of the base, for the shapes of all layers
    if they share tensors of the adapter.
    """
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    config = read_adapter_config(final)
    method = METHODS.get(config["peft_type"])
    if method is not None and not method.merges:
        raise CheckpointError(
            f"kind=merged: {config['peft_type']} cannot be merged one weight at a time. Set kind=adapter."
        )
    mark = f".{PEFT_TYPE_TO_TUNER_MAPPING[config['peft_type']].prefix}"  # before the names of the method's tensors
    parts: dict[str, dict[str, Tensor]] = {}
    shared: dict[str, Tensor] = {}
    updates: dict[str, Callable[[Tensor], Tensor]] = {}
    for full, tensor in adapter_weights(final).items():
        name = without_peft(full)
        layer, has_mark, _ = name.partition(mark)
        if name == full:
            shared[full] = tensor
        elif has_mark and not (method is not None and method.of_norms and name.endswith(".bias")):
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
        shapes = {name: m.weight.shape[::-1] if is_conv1d(m) else m.weight.shape for name, m in layers.items()}
        weights = {layer: torch.zeros(1).expand(shape) for layer, shape in shapes.items()}  # without memory
        whole = {name: tensor for tensors in (shared, *parts.values()) for name, tensor in tensors.items()}
        network = _attached(weights, config, whole)
        return updates | {layer: partial(_merged_in, network.get_submodule(in_peft(layer))) for layer in parts}
    return updates | {
        layer: partial(_merged, layer=layer, config=config, parts=tensors) for layer, tensors in parts.items()
    }


def _merged_in(module: Any, weight: Tensor) -> Tensor:
    """Return the merged weight, in fp32, of a layer that shares tensors with others: PEFT merges this layer alone."""
    layer, without = module.get_base_layer(), module.get_base_layer().weight
    layer.weight = nn.Parameter(weight.to("cpu", torch.float32, copy=True), requires_grad=False)
    module.merge()
    merged: Tensor = layer.weight.detach()
    layer.weight, module.merged_adapters = without, []
    return merged


def _merged(weight: Tensor, layer: str, config: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Tensor:
    """Return the merged weight [out, in] of a layer or stack [experts, out, in], in fp32: PEFT merges a model of this
    layer alone.
    """
    if weight.ndim == 3:
        return _merged_stack(weight, layer, config, parts)
    patterns = {  # PEFT warns about names of other layers
        key: {name: value for name, value in config[key].items() if f".{layer}".endswith(f".{name}")}
        for key in ("rank_pattern", "alpha_pattern")
        if config.get(key)
    }
    with quiet_peft():
        network = _attached({layer: weight.to(torch.float32, copy=True)}, {**config, **patterns}, parts)
        result: Tensor = network.merge_and_unload().get_submodule(layer).weight.detach()
    return result


def _merged_stack(stack: Tensor, layer: str, config: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Tensor:
    """Return a stack of experts merged with its LoRA. Experts are the slow index of A and the fast index of B."""
    a, b = (parts[in_peft(f"{layer}.lora_{half}.weight")].to(stack.device, torch.float32) for half in "AB")
    a, b = a.unflatten(0, (len(stack), -1)), b.unflatten(1, (-1, len(stack))).permute(2, 0, 1)
    r = a.shape[1]
    scale = config["lora_alpha"] / (r**0.5 if config["use_rslora"] else r)
    return torch.baddbmm(stack.float(), b, a, alpha=scale)


def _attached(weights: Mapping[str, Tensor], config: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Any:
    """Return a PEFT model with these layers alone and their adapter."""
    from peft import get_peft_model, set_peft_model_state_dict

    with quiet_peft():
        network = get_peft_model(_model_of(weights), _settings(config))
        result = set_peft_model_state_dict(network, dict(parts))
    assert not result.unexpected_keys, result.unexpected_keys
    return network


def _model_of(weights: Mapping[str, Tensor]) -> Any:
    """Return a model with these layers alone."""
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
    return lm


def _settings(config: Mapping[str, Any]) -> Any:
    """Return the PEFT configuration of an adapter, for a model with its layers alone."""
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    overrides: dict[str, Any] = {
        "task_type": None,
        "modules_to_save": None,
        "trainable_token_indices": None,
        "target_parameters": None,
        "ensure_weight_tying": False,
    }
    overrides |= {"fan_in_fan_out": False, "inference_mode": False, "base_model_name_or_path": None}
    return PEFT_TYPE_TO_CONFIG_MAPPING[config["peft_type"]].from_peft_type(
        **{key: overrides.get(key, value) for key, value in config.items()}
    )


def _with_rows(weight: Tensor, rows: Tensor, ids: list[int]) -> Tensor:
    return weight.float().index_copy(0, torch.tensor(ids, device=weight.device), rows.to(weight.device, torch.float32))


def fully_trained_weights(final: Path) -> dict[str, StoredTensor]:
    """Return the fully trained weights of the adapter, by their names in the model."""
    config = read_adapter_config(final)
    stored = tensors_of_file(final / ADAPTER_WEIGHTS)
    return {without_peft(name): tensor for name, tensor in stored.items() if _is_whole(name, config)}


def _is_whole(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a weight belongs to a fully trained module, or to one that is tied to such a module."""
    whole, plain = config.get("modules_to_save") or (), f".{without_peft(name)}"
    is_tied = config.get("ensure_weight_tying") and not any(mark in plain for mark in (".lora_", ".token_adapter."))
    return bool(is_tied) or any(f".{module}." in plain for module in whole)


# ---- combination


_HALF = {half: f".lora_{half}.weight" for half in ("A", "B")}


@dataclass(frozen=True, slots=True)
class Member:
    """One adapter: its path as typed, its folder, and the factor of its update."""

    path: str
    folder: Path
    factor: float

    def halves(self) -> dict[str, tuple[float, Tensor, Tensor]]:
        """Return the factor of B A, including the adapter's scale, and A and B in float64, by layer; refuse adapters
        with other tensors.
        """
        config = read_adapter_config(self.folder)
        tensors = adapter_weights(self.folder)
        layers = sorted({name.removesuffix(end) for name in tensors for end in _HALF.values() if name.endswith(end)})
        is_plain = config["peft_type"] == "LORA" and not config.get("target_parameters")
        if not is_plain or 2 * len(layers) != len(tensors):
            raise ConfigError(
                f"adapters: {self.path} has more than A and B of LoRA (a head, tokens, stacked experts or another "
                "method), which cannot be combined. Merge it with kind=merged."
            )
        halves = {}
        for layer in layers:
            a, b = (tensors[layer + _HALF[half]].double() for half in ("A", "B"))
            halves[layer] = self.factor * _scale(config, layer, len(a)), a, b
        return halves


def _scale(config: Mapping[str, Any], layer: str, rank: int) -> float:
    """Return the scale of a layer's update, as PEFT computes it."""
    from peft.utils.other import get_pattern_key

    by_layer = config.get("alpha_pattern") or {}
    alpha = float(by_layer.get(get_pattern_key(by_layer.keys(), layer), config["lora_alpha"]))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


Pairs = Sequence[tuple[float, Tensor, Tensor]]  # for one layer: factor, A and B of each member


def _cat(pairs: Pairs, _rank: int | None) -> tuple[Tensor, Tensor]:
    """Return A and B of the exact sum of the updates, with the sum of the ranks."""
    return torch.cat([a for _, a, _ in pairs]), torch.cat([factor * b for factor, _, b in pairs], dim=1)


def _svd(pairs: Pairs, rank: int | None) -> tuple[Tensor, Tensor]:
    """Return A and B of the best approximation of the sum with this rank, without computing the sum."""
    a, b = _cat(pairs, None)
    (q_b, r_b), (q_a, r_a) = torch.linalg.qr(b), torch.linalg.qr(a.T)
    u, s, v = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    return (q_a @ v[:rank].T).T, q_b @ (u[:, :rank] * s[:rank])


def _linear(pairs: Pairs, _rank: int | None) -> tuple[Tensor, Tensor]:
    """Return A and B as PEFT's `linear`: separate sums, each with the root of the factor, so that updates mix."""
    _require_equal_ranks(pairs, "linear")
    roots = [math.sqrt(abs(factor)) for factor, _, _ in pairs]
    a = sum(math.copysign(root, pair[0]) * pair[1] for root, pair in zip(roots, pairs, strict=True))
    b = sum(root * pair[2] for root, pair in zip(roots, pairs, strict=True))
    assert isinstance(a, Tensor)
    assert isinstance(b, Tensor)
    return a, b


def _require_equal_ranks(pairs: Pairs, how: str) -> None:
    if len({a.shape for _, a, _ in pairs}) > 1:
        raise ConfigError(f"combine={how}: the adapters have different ranks. Set combine=cat, which takes any rank.")


COMBINATIONS: dict[str, Callable[[Pairs, int | None], tuple[Tensor, Tensor]]] = {
    "cat": _cat,
    "svd": _svd,
    "linear": _linear,
}


@dataclass(frozen=True, slots=True)
class Combination:
    """How adapters are summed; a pruning method keeps the share `density` of values, some of them drawn by `seed`."""

    how: str
    rank: int | None = None
    density: float | None = None
    seed: int = 0


def _pruned_sum(
    members: Sequence[Member], combination: Combination, shapes: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B of each layer as PEFT sums the adapters; `shapes` are [out, in]."""
    from peft import get_peft_model, set_peft_model_state_dict

    lm: Any = _model_of({without_peft(layer): torch.zeros(1).expand(shape) for layer, shape in shapes.items()})
    network: Any = None
    names = [str(number) for number in range(len(members))]
    with quiet_peft(), torch.random.fork_rng(devices=[]):
        for name, member in zip(names, members, strict=True):
            tensors = adapter_weights(member.folder)
            layers = {without_peft(full).partition(".lora_")[0] for full in tensors}
            exact = {"target_modules": sorted(layers), "init_lora_weights": True}
            settings = _settings({**read_adapter_config(member.folder), **exact})
            if network is None:
                network = get_peft_model(lm, settings, adapter_name=name)
            else:
                network.add_adapter(name, settings)
            set_peft_model_state_dict(network, tensors, adapter_name=name)
        torch.manual_seed(combination.seed)
        network.base_model.add_weighted_adapter(
            names,
            [member.factor for member in members],
            "sum",
            combination_type=combination.how,
            svd_rank=combination.rank,
            svd_full_matrices=False,
            density=combination.density,
        )
    modules = {layer: network.get_submodule(in_peft(without_peft(layer))) for layer in shapes}
    return {
        layer: (module.lora_A["sum"].weight.detach().double(), module.lora_B["sum"].weight.detach().double())
        for layer, module in modules.items()
    }


def _combined(
    members: Sequence[Member], pairs: Mapping[str, Pairs], combination: Combination
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B of the sum, by layer."""
    how = combination.how
    if how in COMBINATIONS:
        return {layer: COMBINATIONS[how](of_layer, combination.rank) for layer, of_layer in pairs.items()}
    if not how.endswith("svd"):
        for of_layer in pairs.values():
            _require_equal_ranks(of_layer, how)
    shapes = {layer: (len(b), a.shape[1]) for layer, ((_, a, b), *_) in pairs.items()}
    return _pruned_sum(members, combination, shapes)


def combine(members: Sequence[Member], combination: Combination, target: Path) -> tuple[int, float]:
    """Write an adapter that sums `members`, with other settings from the file in `target`; return its rank and the
    relative difference of all updates from the weighted sum.
    """
    of_members = [member.halves() for member in members]
    pairs = {
        layer: [halves[layer] for halves in of_members if layer in halves] for layer in sorted(set().union(*of_members))
    }
    for layer, of_layer in pairs.items():
        if len({(a.shape[1], b.shape[0]) for _, a, b in of_layer}) > 1:
            raise ConfigError(
                f"adapters: the shapes of {layer} differ, so the adapters have different bases. Leave one out."
            )
    combined = _combined(members, pairs, combination)
    apart = whole = 0.0
    for layer, of_layer in pairs.items():
        a, b = _cat(of_layer, None)
        apart += _norm(torch.cat([combined[layer][0], a]), torch.cat([combined[layer][1], -b], dim=1)) ** 2
        whole += _norm(a, b) ** 2
    highest, rank = max(len(a) for a, _ in combined.values()), combination.rank
    if combination.how == "svd" and rank is not None and rank > highest:
        raise ConfigError(
            f"rank={rank}: the adapters have a total rank of {highest}, exact without rank=. Leave it out."
        )
    tensors = {}
    for layer, (a, b) in combined.items():  # layers that some members lack have a lower rank
        more = highest - len(a)
        tensors[layer + _HALF["A"]] = torch.nn.functional.pad(a, (0, 0, 0, more)).float().contiguous()
        tensors[layer + _HALF["B"]] = torch.nn.functional.pad(b, (0, more)).float().contiguous()
    save_file(tensors, target / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    _write_config(set(combined), highest, target / ADAPTER)
    return highest, math.sqrt(apart / whole) if whole else 0.0


def _norm(a: Tensor, b: Tensor) -> float:
    """Return the Frobenius norm of B A without computing B A."""
    return float((torch.linalg.qr(b)[1] @ torch.linalg.qr(a.T)[1].T).norm())


def _write_config(layers: set[str], rank: int, file: Path) -> None:
    """Rewrite the settings of another adapter for these layers and a scale of one."""
    config = json.loads(file.read_text())
    names = set(map(without_peft, layers))
    config |= {"r": rank, "lora_alpha": rank, "target_modules": sorted(names)}
    config |= {"use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}, "init_lora_weights": True}
    file.write_text(json.dumps(config, indent=2, sort_keys=True))
