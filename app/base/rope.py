"""Scaled RoPE (`model.rope`): more positions than the base was trained with, in a transformers configuration."""

import json
import math
from collections.abc import Mapping
from typing import Any

from transformers.modeling_rope_utils import RopeParameters

from app.config.kinds import OWN
from app.config.schema import ModelConfig
from app.errors import ConfigError

_FULL = "full_attention"  # with RoPE per layer type: layers with a window see no more distances than before
_REPLACEABLE = ("default", "linear", "dynamic", "llama3", "longrope", "yarn")
_UNSCALED = {"rope_theta", "partial_rotary_factor", "mrope_section"}  # stay as they are
_OF_SCALING = {"type", *RopeParameters.__annotations__} - _UNSCALED
# the last is an older place of a key of `rope_parameters`, which takes precedence
_FIELDS = ("rope_parameters", "max_position_embeddings", "original_max_position_embeddings")


def scale_rope(config: ModelConfig, numbers: Any) -> None:
    """Write the RoPE of `model.rope` and its positions into a transformers configuration.

    A configuration that already has them does not change: that of a trained model, or of a saved random base.
    """
    if config.rope == OWN or config.rope_factor is None:
        return
    text = numbers.get_text_config(decoder=True)
    ropes = getattr(text, "rope_parameters", None) or {}
    by_layer = bool(text.nested_rope_parameter_keys(ropes))
    rope = ropes.get(_FULL) if by_layer else ropes
    if not rope or rope["rope_type"] not in _REPLACEABLE:
        cause = f"RoPE of another kind (rope_type={rope['rope_type']})" if rope else "no RoPE"
        raise ConfigError(f"model.rope={config.rope}: {text.model_type} models have {cause}. Leave model.rope out.")
    positions = text.max_position_embeddings
    original = config.rope_original or _original(rope, positions)
    scaled = {name: value for name, value in rope.items() if name not in _OF_SCALING}
    scaled |= {"rope_type": config.rope, "factor": config.rope_factor}
    if config.rope == "yarn":
        scaled["original_max_position_embeddings"] = original
    longer = config.scaled_positions(original)
    if longer == positions and scaled == {name: value for name, value in rope.items() if name != "type"}:
        return
    _require_typed(config, rope, by_layer=by_layer)
    if longer < positions:
        raise ConfigError(
            f"model.rope_factor={config.rope_factor:g} times {original:,} positions is {longer:,}, but the base has "
            f"{positions:,}. Set model.rope_factor={math.floor(positions / original) + 1} or more."
        )
    text.rope_parameters = {**ropes, _FULL: scaled} if by_layer else scaled
    text.max_position_embeddings = longer
    if hasattr(text, _FIELDS[2]):
        text.original_max_position_embeddings = original


def _original(rope: Mapping[str, Any], positions: int) -> int:
    """Return the positions before scaling, as far as the configuration shows."""
    factor = rope["factor"] if rope["rope_type"] == "linear" else 1
    return int(rope.get("original_max_position_embeddings") or positions / factor)


def _require_typed(config: ModelConfig, rope: Mapping[str, Any], *, by_layer: bool) -> None:
    """Refuse to replace another scaling unless `model.rope_original` says from how many positions."""
    if config.rope_original is not None or (rope["rope_type"] == "default" and not by_layer):
        return
    original = rope.get("original_max_position_embeddings")
    factor = f", factor={rope['factor']:g}" if "factor" in rope else ""
    layers = " of its layers with full attention (the others keep theirs)" if by_layer else ""
    raise ConfigError(
        f"model.rope={config.rope} would replace the RoPE of the base{layers}: rope_type={rope['rope_type']}{factor}. "
        f"To replace it, set model.rope_original to its positions before scaling"
        f"{'' if original is None else f', model.rope_original={original}'}. To keep it, leave model.rope out."
    )


def rope_of(numbers: Any) -> dict[str, Any]:
    """Return the values of config.json that `model.rope` sets."""
    text = numbers.get_text_config(decoder=True)
    return {name: getattr(text, name) for name in _FIELDS if hasattr(text, name)}


def in_config(rope: Mapping[str, Any]) -> str:
    """Return the values as they stand in a config.json."""
    return json.dumps(rope)[1:-1]


def require_scaled(config: ModelConfig, lm: Any) -> None:
    """Refuse a model class that ignores the scaling in its configuration."""
    kinds = [module.rope_type for module in lm.modules() if hasattr(module, "rope_type")]
    types = {name for kind in kinds for name in (kind.values() if isinstance(kind, dict) else [kind])}
    if config.rope != OWN and config.rope not in types:
        raise ConfigError(
            f"model.rope={config.rope}: {type(lm).__name__} does not scale its RoPE as config.json says. Leave "
            "model.rope out."
        )
