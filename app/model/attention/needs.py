"""What a model asks of attention, read from its configuration and its parameters' names: no weight is needed."""

from typing import Any

import torch

from app.model.attention.rules import Needs

_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def needs_of(lm: Any, compute: torch.dtype | None, *, packed: bool, longest: int | None = None) -> Needs:
    """`lm` may be on meta. What this does not see, a kernel refuses when it is asked for it.

    `longest`: no row has more tokens.
    """
    config = lm.config
    key_size, value_size = _head_sizes(config)
    return Needs(
        packed=packed,
        compute=compute,
        softcap=getattr(config, "attn_logit_softcapping", None) is not None,
        sinks=any(name.endswith(".sinks") for name, _ in lm.named_parameters()),
        dropout=any(getattr(config, name, None) for name in _DROPOUTS),
        key_size=key_size,
        value_size=value_size,
        window=_has_window(config, longest),
    )


def _has_window(config: Any, longest: int | None) -> bool:
    """That is smaller than the longest row."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is None or (kinds and "sliding_attention" not in kinds):
        return False
    return longest is None or window < longest


def _head_sizes(config: Any) -> tuple[int, int]:
    """Of keys and of values; kinds with compressed keys and values name them apart."""
    even = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = getattr(config, "qk_rope_head_dim", None)
    if rotated is None:
        return even, even
    return config.qk_nope_head_dim + rotated, config.v_head_dim
