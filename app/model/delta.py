"""What an adapter adds to each weight, read from its files alone."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.errors import CheckpointError

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_PREFIX = "base_model.model."
WEIGHTS = "adapter_model.safetensors"
# what would make the sum another one, with the value that does not
_PLAIN = {
    "peft_type": "LORA",
    "use_dora": False,
    "lora_bias": False,
    "bias": "none",
    "alpha_pattern": {},
    "target_parameters": None,
}


@dataclass(frozen=True, slots=True)
class LowRank:
    """scale * B @ A, of a layer's weight [out, in]."""

    a: Tensor
    b: Tensor
    scale: float

    def whole(self, device: torch.device) -> Tensor:
        """In fp32."""
        return self.scale * (self.b.to(device, torch.float32) @ self.a.to(device, torch.float32))


def read_deltas(final: Path) -> dict[str, LowRank]:
    """By the full name of the layer; refused where something in the adapter is more than such a product."""
    from safetensors.torch import load_file

    config = json.loads((final / "adapter_config.json").read_text())
    _require_plain(final, config)
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(str(final / WEIGHTS)).items():
        known = _NAME.fullmatch(name)
        if known is None and _is_whole(name, config):
            continue
        if known is None:
            raise CheckpointError(_refusal(final, f"the tensor {name}"))
        halves.setdefault(known["module"], {})[known["half"]] = tensor
    alone = sorted(module for module, both in halves.items() if both.keys() != {"A", "B"})
    if alone or not halves:
        raise CheckpointError(f"{final}: the adapter lacks a half of {', '.join(alone[:3]) or 'everything'}.")
    return {
        module: LowRank(both["A"], both["B"], _scale(config, both["A"])) for module, both in halves.items()
    }


def whole_weights(final: Path) -> dict[str, str]:
    """What the adapter has in place of a weight of the base: by the name in the model, the name in its file."""
    from safetensors import safe_open

    config = json.loads((final / "adapter_config.json").read_text())
    with safe_open(str(final / WEIGHTS), "pt") as content:
        names = [name for name in content.keys() if _is_whole(name, config)]  # noqa: SIM118 (not a mapping)
    return {name.removeprefix(_PREFIX): name for name in names}


def _is_whole(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a weight is of a module that was trained as a whole."""
    parts = name.removeprefix(_PREFIX).split(".")[:-1]
    return name.startswith(_PREFIX) and not set(parts).isdisjoint(config.get("modules_to_save") or ())


def _scale(config: Mapping[str, Any], a: Tensor) -> float:
    rank, alpha = a.shape[0], float(config["lora_alpha"])
    return float(alpha / rank**0.5 if config.get("use_rslora") else alpha / rank)


def _require_plain(final: Path, config: Mapping[str, Any]) -> None:
    for key, plain in _PLAIN.items():
        given = config.get(key)
        if given != plain and given:
            raise CheckpointError(_refusal(final, f"{key}={given}"))


def _refusal(final: Path, what: str) -> str:
    return (
        f"kind=merged: the adapter in {final} has {what}, which is not merged here yet. kind=adapter exports it as "
        "it is."
    )
