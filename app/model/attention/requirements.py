"""Rules that layers give to attention, needs of a run, and refusals of variable-length kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from app.batch import PackedSequences
from app.errors import ConfigError
from app.model.kernels import is_ampere


@dataclass(frozen=True, slots=True)
class Rules:
    """Parameters of one layer's attention besides q, k and v."""

    causal: bool
    scale: float | None
    dropout: float
    window: int | None  # tokens each side of the query may see, itself included
    softcap: float | None
    sinks: Tensor | None  # one logit per head that takes part in the softmax and is dropped


@dataclass(frozen=True, slots=True)
class Needs:
    """Needs of a run, known before any weight is loaded."""

    packed: bool
    compute: torch.dtype | None  # of autocast; None: everything is float32
    softcap: bool
    sinks: bool
    dropout: bool
    key_size: int  # of one head of keys or queries
    value_size: int


Kernel = Callable[[Tensor, Tensor, Tensor, Rules, PackedSequences | None], Tensor]


_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def dropouts_of(lm: Any) -> dict[str, float]:
    """The dropouts of attention weights by their names in config.json."""
    return {name: rate for name in _DROPOUTS if (rate := getattr(lm.config, name, None))}


def needs_of(lm: Any, compute: torch.dtype | None, *, packed: bool) -> Needs:
    """Needs read from configuration and parameter names; `lm` may be on meta.

    A rule that does not show in the configuration is refused by the kernel (`require_rules`).
    """
    config = lm.config
    key_size = value_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if getattr(config, "qk_rope_head_dim", None) is not None:  # compressed keys and values
        key_size, value_size = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    return Needs(
        packed=packed,
        compute=compute,
        softcap=getattr(config, "attn_logit_softcapping", None) is not None,
        sinks=any(name.endswith(".sinks") for name, _ in lm.named_parameters()),
        dropout=bool(dropouts_of(lm)),
        key_size=key_size,
        value_size=value_size,
    )


MAX_HEAD_SIZE = 256
HALVES = (torch.bfloat16, torch.float16)


def missing_gpu(device: torch.device) -> list[str]:
    """The GPU that `device` lacks, in words."""
    return [] if is_ampere(device) else ["an NVIDIA GPU of the Ampere generation or newer"]


def refusals(needs: Needs, *, softcap: bool = False) -> list[str]:
    """The needs that a variable-length kernel cannot serve, in words; `softcap`: this one can cap."""
    size = needs.key_size
    asked = {
        "padded rows (batching.packing=false)": not needs.packed,
        "float32 arithmetic (precision=fp32 or tf32)": needs.compute not in HALVES,
        "soft-capping": needs.softcap and not softcap,
        "attention sinks": needs.sinks,
        "dropout of attention weights": needs.dropout,
        f"heads of {size} numbers (multiples of 8 up to {MAX_HEAD_SIZE})": size % 8 or size > MAX_HEAD_SIZE,
        f"keys of {size} and values of {needs.value_size} numbers": size != needs.value_size,
    }
    return [words for words, wanted in asked.items() if wanted]


def require_rules(name: str, rules: Rules, *, softcap: bool = False) -> None:
    """Refuse a rule that the model's configuration did not show."""
    asked = {
        "soft-capping": rules.softcap is not None and not softcap,
        "attention sinks": rules.sinks is not None,
        "dropout of attention weights": rules.dropout > 0,
    }
    wanted = [words for words, asks in asked.items() if asks]
    if wanted:
        raise ConfigError(cannot(name, wanted))


def cannot(name: str, wanted: list[str]) -> str:
    """The message that backend `name` cannot do what is wanted."""
    return f"attention={name} cannot do {' and '.join(wanted)}, which this run asks for. Set attention=sdpa."
