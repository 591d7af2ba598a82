"""LoRA and its kin: PEFT's configuration, and what is drawn where the base is on meta."""

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from app.errors import ConfigError
from app.model.adapter_method import AdapterMethod
from app.model.base_weights import Put, in_memory
from app.model.experts import adapted_experts, layer_or_stack, stacks_of
from app.model.quantization import is_conv1d


class Lora(AdapterMethod):
    """LoRA, W + alpha / r * B A: B starts at zero, so A has no gradient before B has moved."""

    peft_type = "LORA"
    written: ClassVar = {
        "fan_in_fan_out": lambda value: isinstance(value, bool),
        "r": lambda value: type(value) is int and value > 0,
        **dict.fromkeys(("lora_alpha", "lora_dropout"), lambda value: type(value) in (int, float) and value >= 0),
    }
    trained = (".lora_A.default.weight", ".lora_B.default.weight")
    moves_in: ClassVar = {1: ".lora_B.", 2: ".lora_A."}
    on_meta = True
    mergeable = re.compile(r"(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")

    def peft_config(self, lm: Any, layers: list[str], shared: Mapping[str, Any]) -> Any:
        """Refuse a rank that no adapted weight can have."""
        from peft import LoraConfig

        r, modules = self.config.r, [lm.get_submodule(layer) for layer in layers]
        stacks = stacks_of(lm) if self.config.experts else {}
        if self.config.experts and not stacks:
            raise ConfigError(
                f"adapter.experts=true: a model of kind {lm.config.model_type} has no stacks of experts that "
                "transformers calls through its interface. Set adapter.experts=false."
            )
        sizes = [m.weight.shape if is_conv1d(m) else (m.in_features, m.out_features) for m in modules]
        highest = max(map(min, [*sizes, *(shape[1:] for shape in stacks.values())]))
        if r > highest:
            raise ConfigError(
                f"adapter.r={r}: no adapted layer of this model has a rank above {highest:,}. Usual are 8 to 128; "
                f"set adapter.r={highest} at most."
            )
        return LoraConfig(
            **shared,
            r=r,
            lora_alpha=self.config.alpha,
            lora_dropout=self.config.dropout,
            fan_in_fan_out=any(map(is_conv1d, modules)),
            target_parameters=sorted({".".join(name.rsplit(".", 2)[-2:]) for name in stacks}) or None,
        )

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

    @staticmethod
    def merged(weight: Tensor, config: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Tensor:
        a, b = (parts[half].to(weight.device, torch.float32) for half in ("A", "B"))
        return weight.float() + float(config["lora_alpha"]) / len(a) * (b @ a)
