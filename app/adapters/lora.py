"""LoRA and its kin: PEFT's configuration, and what is drawn where the base is on meta."""

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from app.adapters.adapter_method import AdapterMethod
from app.adapters.lora_inits import LATE, Lost, Rows, begin
from app.base.base_weights import Put, in_memory
from app.config.adapters import ADAPTER, ADAPTER_WEIGHTS, LAYER_NAME
from app.config.did_you_mean import did_you_mean
from app.errors import ConfigError
from app.layers.experts import adapted_experts, layer_or_stack, stacks_of
from app.layers.quantization import is_conv1d


def _is_pattern(value: Any) -> bool:
    """Whether it maps names to numbers: others could be endless regular expressions."""
    return isinstance(value, dict) and all(
        LAYER_NAME.fullmatch(name) and type(number) in (int, float) and number > 0 for name, number in value.items()
    )


def _without_order(pattern: Mapping[str, Any], layers: list[str]) -> dict[str, Any]:
    """A pattern with one name for each layer: of several that end a layer's name the longest counts.

    PEFT takes the first, and sorts them when it saves: a loaded adapter would have other scales than the trained one.
    """
    if not any(name.endswith(f".{other}") for name in pattern for other in pattern):
        return dict(pattern)
    fitting = {layer: [name for name in pattern if f".{layer}".endswith(f".{name}")] for layer in layers}
    return {layer: pattern[max(names, key=len)] for layer, names in fitting.items() if names}


def _is_token_rows(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and all(LAYER_NAME.fullmatch(name) and isinstance(ids, list) for name, ids in value.items())
        and all(type(each) is int and each >= 0 for ids in value.values() for each in ids)
    )


def save_as_update(folder: Path, start: Mapping[str, Tensor]) -> None:
    """Rewrite a saved adapter as the difference from `start`: [A; A0] and [B, -B0], of twice the rank.

    Scales stay: alpha grows with the rank, or with its square root in rsLoRA.
    """
    weights, config = load_file(folder / ADAPTER_WEIGHTS), json.loads((folder / ADAPTER).read_text())
    for name, began in start.items():
        is_a = ".lora_A." in name
        weights[name] = torch.cat([weights[name], began if is_a else -began], dim=0 if is_a else 1)
    factor = 2**0.5 if config["use_rslora"] else 2
    config |= {"r": 2 * config["r"], "lora_alpha": factor * config["lora_alpha"], "init_lora_weights": True}
    config["rank_pattern"] = {name: 2 * each for name, each in config["rank_pattern"].items()}
    config["alpha_pattern"] = {name: factor * each for name, each in config["alpha_pattern"].items()}
    save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (folder / ADAPTER).write_text(json.dumps(config, indent=2, sort_keys=True))


class Lora(AdapterMethod):
    """LoRA, W + alpha / r * B A: B starts at zero, so A has no gradient before B has moved."""

    peft_type = "LORA"
    written: ClassVar = {
        **dict.fromkeys(
            ("fan_in_fan_out", "use_rslora", "use_dora", "ensure_weight_tying"), lambda value: isinstance(value, bool)
        ),
        "r": lambda value: type(value) is int and value > 0,
        **dict.fromkeys(("lora_alpha", "lora_dropout"), lambda value: type(value) in (int, float) and value >= 0),
        **dict.fromkeys(("rank_pattern", "alpha_pattern"), _is_pattern),
        "trainable_token_indices": _is_token_rows,
        # which leave the base as it is
        "init_lora_weights": lambda value: value in (True, False, "gaussian", "orthogonal"),
    }
    moves_in: ClassVar = {1: ".lora_B.", 2: ".lora_A."}

    @property
    def trained(self) -> tuple[str, ...]:
        """The halves, and DoRA's lengths."""
        ends = (".lora_A.default.weight", ".lora_B.default.weight")
        return (*ends, ".lora_magnitude_vector.default.weight") if self.config.dora else ends

    @property
    def on_meta(self) -> bool:
        """Whether nothing of it is read from the base, but for whole copies."""
        config = self.config
        return config.init == "default" and not config.dora and config.train_tokens in ([], "all")

    def peft_config(self, lm: Any, layers: list[str], shared: Mapping[str, Any]) -> Any:
        """Refuse ranks that no adapted weight can have, and patterns for none of the layers."""
        from peft import LoraConfig

        config, modules = self.config, [lm.get_submodule(layer) for layer in layers]
        stacks = stacks_of(lm) if config.experts else {}
        if config.experts and not stacks:
            raise ConfigError(
                f"adapter.experts=true: a model of kind {lm.config.model_type} has no stacks of experts that "
                "transformers calls through its interface. Set adapter.experts=false."
            )
        sizes = [m.weight.shape if is_conv1d(m) else (m.in_features, m.out_features) for m in modules]
        self._require_possible(max(map(min, [*sizes, *(shape[1:] for shape in stacks.values())])))
        self._require_named(layers)
        if config.init == "loftq" and (getattr(lm.config, "quantization_config", None) or {}).get("load_in_4bit"):
            raise ConfigError(
                "adapter.init=loftq: the folder of the model has packed weights, so that what packing lost is not "
                "known. Set adapter.init=eva or default, or give the folder that it was made from."
            )
        # of a base on meta only shapes are wanted
        is_drawn = config.init in ("default", *LATE) or next(lm.parameters()).is_meta
        return LoraConfig(
            **shared,
            r=config.r,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            use_rslora=config.rslora,
            use_dora=config.dora,
            rank_pattern=_without_order(config.rank_pattern, layers),
            alpha_pattern=_without_order(config.alpha_pattern, layers),
            init_lora_weights=True if is_drawn else config.init,
            fan_in_fan_out=any(map(is_conv1d, modules)),
            target_parameters=sorted({".".join(name.rsplit(".", 2)[-2:]) for name in stacks}) or None,
        )

    def _require_possible(self, highest: int) -> None:
        pattern = {f"rank_pattern.{name}": each for name, each in self.config.rank_pattern.items()}
        for key, r in {"r": self.config.r, **pattern}.items():
            if r > highest:
                raise ConfigError(
                    f"adapter.{key}={r}: no adapted layer of this model has a rank above {highest:,}. Usual are 8 to "
                    f"128; set adapter.{key}={highest} at most."
                )

    def _require_named(self, layers: list[str]) -> None:
        ends = {name.split(".", depth)[-1] for name in layers for depth in range(name.count(".") + 1)}
        for key in ("rank_pattern", "alpha_pattern"):
            for name in getattr(self.config, key):
                if name not in ends:
                    raise ConfigError(
                        f"adapter.{key}: {name} is none of the adapted layers, nor the end of their names."
                        f"{did_you_mean(name, sorted(ends))}"
                    )

    @property
    def begin(self) -> Callable[[Any, Rows, Lost], str] | None:
        """For the inits that take rows, or weights as they were before packing."""
        return partial(begin, self.config.init) if self.config.init in LATE else None

    def lr_factor(self, name: str) -> float:
        return self.config.lr_ratio if ".lora_B." in name else 1.0

    @torch.no_grad()
    def draw(self, network: nn.Module, device: torch.device, put: Put) -> None:
        """Draw the numbers that PEFT draws off meta, in its order.

        PEFT rounds them to the base's dtype before it casts them to float32.
        """
        names: dict[Any, str] = {module: name for name, module in network.named_modules()}
        wrappers = [wrapper for each in adapted_experts(network).values() for wrapper in each]
        for module in [*(each for each in names if each not in wrappers), *wrappers]:
            for adapter in getattr(module, "lora_A", ()):
                name, base = names[module], layer_or_stack(module)
                dtype = getattr(base, "compute_dtype", None) or getattr(base, "weight", base).dtype
                dtype = dtype if dtype.is_floating_point else torch.float32
                halves = [(half, getattr(module, half)[adapter]) for half in ("lora_A", "lora_B")]
                drawn = [nn.Linear(layer.in_features, layer.out_features, bias=False) for _, layer in halves]
                nn.init.kaiming_uniform_(drawn[0].weight, a=math.sqrt(5))
                nn.init.zeros_(drawn[1].weight)
                for (half, layer), numbers in zip(halves, drawn, strict=True):
                    weight = numbers.weight.detach().to(device, dtype).float()
                    put(layer, "weight", in_memory(f"{name}.{half}.{adapter}.weight", weight))
