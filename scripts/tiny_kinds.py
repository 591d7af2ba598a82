"""Sizes of a tiny random model of any transformers model type, from its default configuration."""

from functools import cache
from pathlib import Path
from typing import Any

import transformers
import yaml

_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


@cache
def tables() -> dict[str, Any]:
    """Return the content of tiny_kinds.yaml."""
    content: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    return content


def architecture(kind: str) -> dict[str, Any]:
    """Return small sizes of a model type for `model.architecture`, with a layer of each layer type."""
    overrides: dict[str, Any] = tables()["kinds"].get(kind, {})
    config = transformers.CONFIG_MAPPING[kind]
    try:
        default = config()
    except Exception:  # noqa: BLE001  from the validation of any type
        default = config(**overrides)
    sizes = _small_numbers(default)
    text = default.get_text_config(decoder=True)
    part = next((name for name in default.sub_configs if getattr(default, name, None) is text), None)
    if part is not None and text is not default:
        sizes[part] = {"model_type": text.model_type, **_SPECIAL, **_small_numbers(text), **_rope_sections(text)}
    parts = {name: {**sizes.get(name, {}), **keys} for name, keys in overrides.items() if name in default.sub_configs}
    return {"model_type": kind, **_SPECIAL, **sizes, **overrides, **parts}


def _rope_sections(text: Any) -> dict[str, Any]:
    """Return the sections of a small head for time, height and width, for types with multimodal RoPE."""
    rope = getattr(text, "rope_parameters", None) or {}
    if "rope_type" not in rope:
        return {}
    half = int(8 * rope.get("partial_rotary_factor", 1))
    side = half * 3 // 8
    return {"rope_parameters": {**rope, "mrope_section": [half - 2 * side, side, side]}}


def _small_numbers(default: Any) -> dict[str, Any]:
    defaults = vars(default)
    sizes = {key: size for size, keys in tables()["sizes"].items() for key in keys}
    numbers: dict[str, Any] = {
        key: type(defaults[key])(size)
        for key, size in sizes.items()
        if isinstance(defaults.get(key), int | float) and not isinstance(defaults[key], bool)
    }
    types = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    name = default.attribute_map.get("layer_types", "layer_types")
    if types and name in defaults:  # computed from other values in some types
        numbers[name] = types * (1 if len(types) > 1 else 2)
        numbers |= {key: len(numbers[name]) for key in _DEPTHS if key in numbers}
    gates = list(dict.fromkeys(getattr(default, "mlp_layer_types", None) or ()))
    if gates:
        numbers["mlp_layer_types"] = [gates[at % len(gates)] for at in range(numbers["num_hidden_layers"])]
    if "qk_rope_head_dim" in defaults:  # compressed keys and values
        numbers |= {"num_key_value_heads": numbers.get("num_attention_heads", 4), "head_dim": 8}
    return numbers
