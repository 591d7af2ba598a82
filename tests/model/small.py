"""Tiny random models of many kinds, built from numbers alone."""

import functools
from typing import Any

import torch
from torch import Tensor

from app.batch import IGNORE, Batch

VOCABULARY = 64
WIDTH = 32

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    # large enough that a wrong attention or head shows in the logits
    "initializer_range": 0.3,
}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_WINDOW = 8

# By kind: what differs from the numbers above.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": _WINDOW},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {
        "head_dim": 8,
        "sliding_window": _WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 8,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": _WINDOW,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "gpt2": {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64, "tie_word_embeddings": True},
    "phi3": {"sliding_window": None},
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 2.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "cohere2": {
        "sliding_window": _WINDOW,
        "logit_scale": 0.25,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_oss": {"head_dim": 8, "sliding_window": _WINDOW, **_EXPERTS},
    "mixtral": {"sliding_window": None, **_EXPERTS},
}


def numbers(kind: str, **changes: Any) -> dict[str, Any]:
    """An architecture, as it stands in a YAML of conf/model."""
    return {"model_type": kind, **_COMMON, **KINDS.get(kind, {}), **changes}


def config_of(kind: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    given = numbers(kind, **changes)
    return AutoConfig.for_model(given.pop("model_type"), **given)
