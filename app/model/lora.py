"""LoRA adapters by PEFT on the linear layers of a frozen base, and the assertion that exactly they are trained."""

import contextlib
import math
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from app.config.did_you_mean import did_you_mean
from app.config.schema import AdapterConfig
from app.config.tasks import Task
from app.errors import CheckpointError, ConfigError
from app.files import read_json
from app.model.base_weights import in_memory
from app.model.head import head_modules, in_backbone
from app.model.quantization import is_conv1d

ALL_LINEAR = "all-linear"
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# what runs write into adapter_config.json besides PEFT's defaults
_FREE_KEYS = ("task_type", "peft_version", "base_model_name_or_path", "inference_mode", "auto_mapping", "revision")
_WRITTEN: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_FREE_KEYS, lambda value: isinstance(value, str | bool | dict | None)),
    "peft_type": lambda value: value == "LORA",
    "target_modules": lambda value: _are_names(value) and bool(value),
    "modules_to_save": lambda value: value is None or _are_names(value),
    "fan_in_fan_out": lambda value: isinstance(value, bool),
    "r": lambda value: type(value) is int and value > 0,
    **dict.fromkeys(("lora_alpha", "lora_dropout"), lambda value: type(value) in (int, float) and value >= 0),
}
_MODULE_NAME = re.compile(r"[\w.-]+")
_ROUTERS = frozenset({"gate", "shared_expert_gate", "router"})
_EXPERT_LAYERS = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


def add_adapter(config: AdapterConfig, task: Task, lm: Any, base_path: str) -> nn.Module:
    """The network to train: `lm` itself, or `lm` with adapters and everything else frozen."""
    return ADAPTERS[config.kind](config, task, lm, base_path)


def _lora(config: AdapterConfig, task: Task, lm: Any, base_path: str) -> nn.Module:
    layers = layers_to_adapt(config.targets, lm)
    _require_rank(config.r, layers, lm)
    head = head_modules(lm) if task.pooled else []
    whole = {
        f"base_model.model.{name}.modules_to_save.default.{weight}"
        for name in head
        for weight, _ in lm.get_submodule(name).named_parameters()
    }
    lm.name_or_path = base_path  # PEFT writes it as the adapter's base
    with quiet_peft():
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(
            task_type=task.peft_type,
            r=config.r,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            target_modules=_short_names(layers, lm),
            fan_in_fan_out=any(is_conv1d(lm.get_submodule(layer)) for layer in layers),
            modules_to_save=sorted({name.rpartition(".")[2] for name in head}) or None,
        )
        network = get_peft_model(lm, lora)
    _assert_trained(network, {*_lora_weights(layers), *whole})
    result: nn.Module = network
    return result


def read_adapter_config(final: Path) -> dict[str, Any]:
    """adapter_config.json as runs write it: other keys have PEFT do more, some of it endless (a regular expression)."""
    try:
        config = read_json(final / ADAPTER)
    except (OSError, ValueError) as fault:
        raise CheckpointError(f"{final / ADAPTER} cannot be read ({fault}).") from fault
    if not isinstance(config, dict) or not (final / ADAPTER_WEIGHTS).is_file():
        raise CheckpointError(f"{final} is no adapter: {ADAPTER} has no keys, or {ADAPTER_WEIGHTS} is missing.")
    from peft import LoraConfig

    defaults = LoraConfig().to_dict()
    odd = [
        f"{key}={str(value)[:80]}"
        for key, value in ({**dict.fromkeys(_WRITTEN.keys() - set(_FREE_KEYS)), **config}).items()
        if not (_WRITTEN[key](value) if key in _WRITTEN else not value or value == defaults.get(key, value))
    ]
    if odd:
        raise CheckpointError(f"{final / ADAPTER} is none that a run wrote: {', '.join(odd)}.")
    return config


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) and _MODULE_NAME.fullmatch(each) for each in value)


@contextlib.contextmanager
def quiet_peft() -> Iterator[None]:
    """Silence PEFT's use of a name that transformers has since changed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield


@torch.no_grad()
def draw_halves(network: nn.Module, device: torch.device, put: Callable[..., None]) -> None:
    """Draw LoRA weights that were created on meta: the numbers that PEFT draws off meta, in its order.

    PEFT rounds them to the base's dtype before it casts them to float32.
    """
    for name, module in network.named_modules():
        for adapter in getattr(module, "lora_A", ()):
            base: Any = module.get_base_layer()
            dtype = getattr(base, "compute_dtype", None) or base.weight.dtype
            dtype = dtype if dtype.is_floating_point else torch.float32
            halves = [(half, getattr(module, half)[adapter]) for half in ("lora_A", "lora_B")]
            drawn = [nn.Linear(layer.in_features, layer.out_features, bias=False) for _, layer in halves]
            nn.init.kaiming_uniform_(drawn[0].weight, a=math.sqrt(5))
            nn.init.zeros_(drawn[1].weight)
            for (half, layer), numbers in zip(halves, drawn, strict=True):
                weight = numbers.weight.detach().to(device, dtype).float()
                put(layer, "weight", in_memory(f"{name}.{half}.{adapter}.weight", weight))


def trained_copies(network: nn.Module) -> dict[nn.Module, nn.Module]:
    """Trained copies of whole modules (`modules_to_save`), by the modules of the frozen originals."""
    found: dict[nn.Module, nn.Module] = {}
    for module in network.modules():
        if hasattr(module, "original_module"):  # PEFT's wrapper
            wrapper: Any = module
            (copied,) = wrapper.modules_to_save.values()
            found |= dict(zip(wrapper.original_module.modules(), copied.modules(), strict=True))
    return found


ADAPTERS: dict[str, Callable[[AdapterConfig, Task, Any, str], nn.Module]] = {
    "none": lambda _config, _task, lm, _base_path: lm,
    "lora": _lora,
}


def layers_to_adapt(targets: list[str], lm: Any) -> list[str]:
    """The full names of the layers that `targets` mean; each target must match, and the head never does.

    In a mixture of experts all-linear means attention: experts are stacked in 3D parameters, routers choose experts,
    and PEFT takes the names of dense and shared experts for the stacked ones.
    """
    linear = _linear_layers(lm)
    chosen: set[str] = set()
    problems = []
    for target in targets:
        if target == ALL_LINEAR:
            matched = [name for name in linear if not _ROUTERS & set(name.split("."))]
        else:
            matched = [name for name in linear if name == target or name.endswith(f".{target}")]
        if not matched:
            known = sorted({name.rpartition(".")[2] for name in linear})
            problems.append(
                f"adapter.targets: {target} matches no linear layer of this model ({', '.join(known)}; "
                f"or {ALL_LINEAR}).{did_you_mean(target, known)}"
            )
        chosen.update(matched)
    if problems:
        raise ConfigError(problems)
    return sorted(chosen)


def _linear_layers(lm: Any) -> list[str]:
    """Linear layers of the backbone; those outside it are the head."""
    unusable = _EXPERT_LAYERS if _has_stacked_experts(lm) else frozenset()
    return [
        name
        for name, module in lm.named_modules()
        if in_backbone(lm, name)
        and (isinstance(module, nn.Linear) or is_conv1d(module))
        and name.rpartition(".")[2] not in unusable
    ]


def _has_stacked_experts(lm: nn.Module) -> bool:
    return any(".experts." in name and parameter.ndim == 3 for name, parameter in lm.named_parameters())


def _require_rank(r: int, layers: list[str], lm: Any) -> None:
    """Refuse a rank that no adapted weight can have."""
    modules = [lm.get_submodule(layer) for layer in layers]
    highest = max(min(m.weight.shape if is_conv1d(m) else (m.in_features, m.out_features)) for m in modules)
    if r > highest:
        raise ConfigError(
            f"adapter.r={r}: no adapted layer of this model has a rank above {highest:,}. Usual are 8 to 128; "
            f"set adapter.r={highest} at most."
        )


def _short_names(layers: list[str], lm: Any) -> list[str]:
    """Short names, as other tools write them, where PEFT's matching by suffix gives just these layers."""
    short = sorted({name.rpartition(".")[2] for name in layers})
    meant = [name for name, _ in lm.named_modules() if name.rpartition(".")[2] in short]
    return short if set(meant) <= set(layers) else layers


def _lora_weights(layers: list[str]) -> set[str]:
    return {f"base_model.model.{layer}.lora_{half}.default.weight" for layer in layers for half in ("A", "B")}


def _assert_trained(network: nn.Module, expected: set[str]) -> None:
    """Assert that lora_A and lora_B of every chosen layer, a new head, and nothing else are trained."""
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert trained == expected, (
        f"trained but not meant: {trained - expected}; meant but not trained: {expected - trained}"
    )
