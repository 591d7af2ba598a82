"""The numbers of a tiny random model of any kind that transformers knows, from its default configuration."""

from functools import cache
from pathlib import Path
from typing import Any

import transformers
import yaml

_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


@cache
def tables() -> dict[str, Any]:
    """What tiny_kinds.yaml has."""
    content: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    return content


def architecture(kind: str) -> dict[str, Any]:
    """Small numbers of a kind, as they stand in a YAML of conf/model, with a layer of each type."""
    given: dict[str, Any] = tables()["kinds"].get(kind, {})
    config = transformers.CONFIG_MAPPING[kind]
    try:
        default = config()
    except Exception:  # noqa: BLE001  of any kind's own validation
        default = config(**given)
    found = _small_numbers(default)
    text = default.get_text_config(decoder=True)
    part = next((name for name in default.sub_configs if getattr(default, name, None) is text), None)
    if part is not None and text is not default:
        found[part] = {"model_type": text.model_type, **_SPECIAL, **_small_numbers(text), **_rope_sections(text)}
    return {"model_type": kind, **_SPECIAL, **found, **given}


def _rope_sections(text: Any) -> dict[str, Any]:
    """Shares of a small head for time, height and width, for kinds that rotate by all three."""
    rope = getattr(text, "rope_parameters", None) or {}
    if "rope_type" not in rope:
        return {}
    half = int(8 * rope.get("partial_rotary_factor", 1))
    side = half * 3 // 8
    return {"rope_parameters": {**rope, "mrope_section": [half - 2 * side, side, side]}}


def _small_numbers(default: Any) -> dict[str, Any]:
    known = vars(default)
    sizes = {key: size for size, keys in tables()["sizes"].items() for key in keys}
    found: dict[str, Any] = {
        key: type(known[key])(size)
        for key, size in sizes.items()
        if isinstance(known.get(key), int | float) and not isinstance(known[key], bool)
    }
    types = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    name = default.attribute_map.get("layer_types", "layer_types")
    if types and name in known:  # it follows from other numbers in some kinds
        found[name] = types * (1 if len(types) > 1 else 2)
        found |= {key: len(found[name]) for key in _DEPTHS if key in found}
    gates = list(dict.fromkeys(getattr(default, "mlp_layer_types", None) or ()))
    if gates:
        found["mlp_layer_types"] = [gates[at % len(gates)] for at in range(found["num_hidden_layers"])]
    if "qk_rope_head_dim" in known:  # compressed keys and values
        found |= {"num_key_value_heads": found.get("num_attention_heads", 4), "head_dim": 8}
    return found
