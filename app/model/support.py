"""Which kinds of model can be trained rightly here; others are refused by name, before weights are fetched.

Our attention replaces the model's own through transformers' interface, and no mask is built for it. A kind that
does not call the interface would ignore it, and one whose layers need another mask, or carry a state from token to
token, would call it and still be wrong: both would train without an error.
"""

from typing import Any

import torch

from app.config.schema import ModelConfig
from app.errors import ConfigError
from app.model.head import own_head

_LAYERS = frozenset({"full_attention", "sliding_attention"})
_HEAD_FAULTS = (
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


def require_kind(config: ModelConfig, numbers: Any) -> None:
    """What the configuration alone tells; code that a model brings along is judged once it is built."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    known = type(numbers) in MODEL_FOR_CAUSAL_LM_MAPPING
    own_code = config.trust_remote_code and hasattr(numbers, "auto_map")
    if not known and not own_code:
        _refuse(config, numbers.model_type, "it is not a causal language model")
    if numbers.get_text_config(decoder=True) is not numbers:
        _refuse(
            config, numbers.model_type, "it reads more than text, and only the text part could be trained"
        )
    other = sorted(set(getattr(numbers, "layer_types", None) or ()) - _LAYERS)
    if other:
        _refuse(config, numbers.model_type, f"it has layers of {', '.join(other)}")
    if known and not own_code:
        _require_interface(config, MODEL_FOR_CAUSAL_LM_MAPPING[type(numbers)], numbers.model_type)


def require_structure(config: ModelConfig, lm: Any) -> None:
    """What is seen once the model is built, on meta or with its weights."""
    kind = lm.config.model_type
    _require_interface(config, type(lm), kind)
    if lm.base_model is lm:
        _refuse(config, kind, "its backbone cannot be told from its head")
    if any(getattr(module, "is_causal", True) is False for module in lm.modules()):
        _refuse(config, kind, "its tokens see the tokens after them")
    _require_head(config, lm, kind)


def _require_interface(config: ModelConfig, model_class: Any, kind: str) -> None:
    if not model_class._supports_attention_backend:
        _refuse(config, kind, "its attention cannot be replaced by ours")


def _require_head(config: ModelConfig, lm: Any, kind: str) -> None:
    """One row through the head; whether the logits are right is checked on the first batch."""
    row = torch.zeros(1, lm.config.hidden_size, dtype=lm.dtype, device=lm.device)
    try:
        with torch.no_grad():
            own_head(lm)(row)
    except _HEAD_FAULTS as fault:
        _refuse(config, kind, f"its head does not work apart from its backbone: {fault}", fault)


def _refuse(config: ModelConfig, kind: str, reason: str, fault: Exception | None = None) -> None:
    given = "model.architecture" if config.weights == "random" else f"model.path={config.path}"
    raise ConfigError(
        f"{given}: a model of kind {kind} cannot be trained here ({reason}). Choose another: llama, qwen3, "
        "mistral, gemma3_text, phi3, olmo2, gpt_oss and most kinds whose layers are full or sliding attention."
    ) from fault
