"""Attention rules of layers, needs of a run, and refusals of variable-length kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from app.batch import PackedSequences
from app.errors import ConfigError
from app.layers.operations import is_ampere


@dataclass(frozen=True, slots=True)
class Rules:
    """Parameters of one layer's attention besides q, k and v."""

    causal: bool
    scale: float | None
    dropout: float
    window: int | None  # visible tokens on each side of the query, including itself
    softcap: float | None
    sinks: Tensor | None  # one logit per head that is in the softmax and then dropped


@dataclass(frozen=True, slots=True)
class Needs:
    """Attention needs of a run, before any weight is loaded."""

    packed: bool
    compute: torch.dtype | None  # of autocast; None: everything is float32
    softcap: bool
    sinks: bool
    dropout: bool
    heads: frozenset[tuple[int, int]]  # sizes of a key and of a value: layers may differ


Kernel = Callable[[Tensor, Tensor, Tensor, Rules, PackedSequences | None], Tensor]


_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_KEY_SIZES = ("qk_head_dim", "head_dim", "attention_head_size", "head_size")  # attributes of attention modules


def dropouts_of(lm: Any) -> dict[str, float]:
    """Return the dropouts of attention weights by their names in config.json."""
    config = lm.config.get_text_config(decoder=True)
    return {name: rate for name in _DROPOUTS if (rate := getattr(config, name, None))}


def needs_of(lm: Any, compute: torch.dtype | None, *, packed: bool) -> Needs:
    """Return the needs in configuration, parameter names and attention modules; `lm` may be on meta.

    The kernel refuses any other rule (`require_rules`).
    """
    return Needs(
        packed=packed,
        compute=compute,
        softcap=is_capped(lm),
        sinks=any(name.endswith(".sinks") for name, _ in lm.named_parameters()),
        dropout=bool(dropouts_of(lm)),
        heads=frozenset(_head_sizes(module) for module in lm.modules() if hasattr(module, "is_causal")),
    )


def is_capped(lm: Any) -> bool:
    """Return whether attention is soft-capped by the configuration."""
    return getattr(lm.config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None


def _head_sizes(attention: Any) -> tuple[int, int]:
    """Return the key size and value size of one head; 0 if the module does not have them."""
    key = next((getattr(attention, name) for name in _KEY_SIZES if hasattr(attention, name)), 0)
    return key, getattr(attention, "v_head_dim", key)


MAX_HEAD_SIZE = 256
HALVES = (torch.bfloat16, torch.float16)


def missing_gpu(device: torch.device) -> list[str]:
    """Return the GPU that `device` is not, in words."""
    return [] if is_ampere(device) else ["an NVIDIA GPU of the Ampere generation or newer"]


def refusals(needs: Needs, *, softcap: bool = False) -> list[str]:
    """Return the needs that a variable-length kernel does not support, in words; `softcap`: this one can cap."""
    features: dict[str, Any] = {
        "padded rows (batching.packing=false)": not needs.packed,
        "float32 arithmetic (precision=fp32 or tf32)": needs.compute not in HALVES,
        "soft-capping": needs.softcap and not softcap,
        "attention sinks": needs.sinks,
        "dropout of attention weights": needs.dropout,
    }
    for key, value in sorted(needs.heads):
        features[f"heads of size {key} (multiples of 8 up to {MAX_HEAD_SIZE})"] = key % 8 or key > MAX_HEAD_SIZE
        features[f"keys of size {key} with values of size {value}"] = key != value
    return [feature for feature, is_needed in features.items() if is_needed]


def require_rules(name: str, rules: Rules, *, softcap: bool = False) -> None:
    """Refuse a rule that the model's configuration does not show."""
    features = {
        "soft-capping": rules.softcap is not None and not softcap,
        "attention sinks": rules.sinks is not None,
        "dropout of attention weights": rules.dropout > 0,
    }
    unsupported = [feature for feature, is_needed in features.items() if is_needed]
    if unsupported:
        raise ConfigError(cannot(name, unsupported))


def cannot(name: str, features: list[str]) -> str:
    """Return the message that backend `name` does not support the features."""
    return f"attention={name} does not support {' and '.join(features)}, which this run needs. Set attention=sdpa."
