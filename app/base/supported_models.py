"""Supported model types and how they are trained; others are refused by name, before weights are downloaded.

Our attention replaces the model's own through transformers' interface, and no mask is built for it. A kind that does
not call the interface would ignore it. A kind whose layers need another mask would call it and still be wrong. Both
would train without an error. So a table has the tested kinds (`config.kinds`), and the checks before the first step
test the model of the run; a kind outside the table is tried in the best way. Layers that carry a state from token to
token get padded rows (`layers.recurrent`).
"""

import sys
from functools import partial
from typing import Any, NoReturn

import torch
import transformers

from app.base.text_part import OTHER_TEXT, whole_class
from app.config.kinds import OWN, PACKED, REFUSED, Tier, model_kinds
from app.config.schema import ModelConfig
from app.config.tasks import TASKS, Task
from app.errors import ConfigError
from app.layers.head import own_head, pooled_head
from app.layers.recurrent import recurrent_mixers

# other types may differ only in long rows, which the check before the first step does not see
_RECURRENT = frozenset({"linear_attention", "conv", "hybrid"})
_LAYERS = _RECURRENT | {"full_attention", "sliding_attention", "mlp", "moe"}
OWN_ATTENTION = "only its own attention implementation works"
_HEAD_FAULTS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


def require_kind(config: ModelConfig, task: Task, numbers: Any) -> None:
    """Check the configuration; custom code of a model is checked when the model is built."""
    tier = tier_of(config, task, numbers)
    if not tier.accepted:
        _refuse(config, task, numbers, tier.reason)


def tier_of(config: ModelConfig, task: Task, numbers: Any) -> Tier:
    """Return how the task trains a model of this configuration, as far as it shows."""
    own_code = config.trust_remote_code and hasattr(numbers, "auto_map")
    proven = None if own_code else _proven(task, numbers.model_type)
    if proven is not None and not proven.accepted and proven.compared:
        return proven
    reason = _reason(task, numbers, own_code=own_code)
    if reason is not None:
        return Tier(REFUSED, reason)
    types = set(getattr(numbers.get_text_config(decoder=True), "layer_types", None) or ())
    strange = types - _LAYERS - set(proven.layers if proven else ())
    if strange:
        return Tier(REFUSED, f"it has unsupported layers: {', '.join(sorted(strange))}")
    if proven is not None and proven.compared:
        return proven
    classes = whole_class(numbers, task) or getattr(transformers, task.mapping).get(type(numbers), None)
    classes = classes if isinstance(classes, tuple) else (classes,)
    if own_code or types & _RECURRENT or any(map(_calls_interface, classes)):
        return Tier(PACKED)
    return Tier(OWN, OWN_ATTENTION)


def _proven(task: Task, kind: str) -> Tier | None:
    """Return the table entry of a kind in the sections of the task's class."""
    sections = [
        section
        for name, section in model_kinds().tasks.items()
        if (TASKS.get(name) or TASKS["causal"]).auto_class == task.auto_class
    ]
    return next((tiers[kind] for tiers in sections if kind in tiers), None)


def _reason(task: Task, numbers: Any, *, own_code: bool) -> str | None:
    """Return why a model of this configuration cannot have the task; None if nothing shows it."""
    whole = _whole_class(task, numbers)
    if isinstance(whole, str):
        return whole
    model_class = whole or getattr(transformers, task.mapping).get(type(numbers), None)
    if model_class is None and not own_code:
        return f"it is not {task.description}"
    return None


def _whole_class(task: Task, numbers: Any) -> Any:
    """Return the class of a composite that is trained as a whole on text, None for others; or the refusal."""
    if numbers.is_encoder_decoder or "encoder" in numbers.sub_configs:
        return "it is an encoder-decoder, whose cross-attention has no packing, memory estimate or generation here"
    text, whole = numbers.get_text_config(decoder=True), whole_class(numbers, task)
    if numbers.model_type in OTHER_TEXT:
        return f"its text part, of kind {text.model_type}, is not computed as in the whole model"
    if text is not numbers and (whole is None or not task.writes_text):
        return "it is multimodal, and its text part can only be trained with task=causal"
    return whole if task.writes_text else None


def _calls_interface(kind: Any) -> bool:
    """Return whether a class calls transformers' attention interface; some kinds that do lack the flag."""
    return kind._supports_attention_backend or hasattr(sys.modules[kind.__module__], "ALL_ATTENTION_FUNCTIONS")


def require_structure(config: ModelConfig, task: Task, lm: Any) -> None:
    """Check the built model, on meta or with its weights."""
    refuse = partial(_refuse, config, task, lm.config)
    if tier_of(config, task, lm.config).name != OWN and not (_calls_interface(type(lm)) or recurrent_mixers(lm)):
        refuse(OWN_ATTENTION)
    if lm.base_model is lm:
        refuse("its backbone and head are not separate modules")
    ways = {not module.is_causal for module in lm.modules() if isinstance(getattr(module, "is_causal", None), bool)}
    if task.sees != "either" and (task.sees == "before") in ways:
        refuse("its attention is causal" if task.sees == "both" else "its attention is bidirectional")
    if len(ways) > 1:
        refuse("some of its layers have causal and others bidirectional attention")
    # one row through the head; whether the logits are right is checked on the first batch
    row = torch.zeros(1, lm.config.get_text_config().hidden_size, dtype=lm.dtype, device=lm.device)
    try:
        with torch.no_grad():
            (pooled_head if task.pooled else own_head)(lm)(row)
    except _HEAD_FAULTS as fault:
        refuse(f"its head cannot run without its backbone: {fault}", fault)


def _refuse(config: ModelConfig, task: Task, numbers: Any, reason: str, fault: Exception | None = None) -> NoReturn:
    source = "model.architecture" if config.weights == "random" else f"model.path={config.path}"
    others = [
        name
        for name, other in TASKS.items()
        if other.auto_class != task.auto_class and tier_of(config, other, numbers).accepted
    ]
    other_task = f"; or try task={others[0]}, which has a class for this kind" if others else ""
    raise ConfigError(
        f"{source}: a model of kind {numbers.model_type} is not supported ({reason}). "
        f"Choose another: {task.examples}{other_task}."
    ) from fault
