"""The text part of a composite (a model that reads more than text): its class, and its names in the composite.

The text part is trained with its own transformers class. Without one, it is trained with the class of the composite,
without the other towers, on text.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from app.base.weight_files import Names, in_peft, without_peft
from app.config.adapters import ADAPTER, ADAPTER_WEIGHTS
from app.config.tasks import Task

# kinds whose composite computes text differently from the class of its text part, as a test of all kinds shows
OTHER_TEXT = ("aya_vision", "cohere2_vision", "paligemma")


def whole_class(numbers: Any, task: Task) -> Any:
    """Return the class of a composite; None for a model that the task has a class for."""
    alone = numbers.get_text_config(decoder=True) is numbers and type(numbers) in getattr(transformers, task.mapping)
    if alone or numbers.is_encoder_decoder:
        return None
    return transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(numbers), None)


def text_numbers(numbers: Any, task: Task) -> Any:
    """Return the configuration of the text part if transformers has a class for it; else `numbers`."""
    text = numbers.get_text_config(decoder=True)
    is_known = type(text) in getattr(transformers, task.mapping) and whole_class(numbers, task) is not None
    if text is numbers or not (task.writes_text and is_known) or numbers.model_type in OTHER_TEXT:
        return numbers
    tied = getattr(numbers, "tie_word_embeddings", None)
    if tied is not None:  # the composite decides
        text.tie_word_embeddings = tied
    text.dtype = text.dtype or numbers.dtype
    if hasattr(numbers, "quantization_config"):
        text.quantization_config = numbers.quantization_config
    return text


def leave_out_towers(whole: Any) -> None:
    """Remove all modules except the text decoder and the head, in place."""
    parts = [module for module in (whole.get_decoder(), whole.get_output_embeddings()) if module is not None]
    inside = {module for part in parts for module in part.modules()}
    for outer in [module for module in whole.modules() if module not in inside]:
        for name, child in list(outer.named_children()):
            if inside.isdisjoint(child.modules()):
                setattr(outer, name, None)


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text part of a composite `whole`, which is on meta."""

    whole: Any
    names: Names

    @classmethod
    def of(cls, lm: Any, numbers: Any, task: Task) -> "TextPart | None":
        """Return the text part for `numbers` of a composite; None if `lm` is a whole model."""
        kind = whole_class(numbers, task)
        if kind is None:
            return None
        with torch.device("meta"):
            whole = kind._from_config(numbers, dtype=lm.dtype)
        if kind is type(lm):
            return cls(whole, Names(tuple((name, name) for name in _outermost(lm, whole))))
        inside = {type(module): name for name, module in reversed([*whole.named_modules()]) if name}
        if type(lm) in inside:
            return cls(whole, Names(tuple((child, f"{inside[type(lm)]}.{child}") for child, _ in lm.named_children())))
        heads = [(child, child) for child, _ in lm.named_children() if child != lm.base_model_prefix]
        return cls(whole, Names(((lm.base_model_prefix, inside[type(lm.base_model)]), *heads)))


def _outermost(lm: Any, whole: Any) -> list[str]:
    """Return the names of the outermost modules and parameters of `lm` that lack nothing of the composite."""
    lacking = {name for name, _ in whole.named_modules()} - {name for name, _ in lm.named_modules()}
    around = {name[:at] for name in lacking for at, letter in enumerate(name) if letter == "."} | {""}
    around -= lacking
    names: list[str] = []
    for name in around:
        module, prefix = lm.get_submodule(name), f"{name}." if name else ""
        names += [f"{prefix}{child}" for child in (*module._parameters, *dict(module.named_children()))]
    return sorted(set(names) - around)


def rename_adapter(source: Path, target: Path, renamed: Callable[[str], str | None]) -> None:
    """Write an adapter with renamed layers, by full names: short ones would match other towers too."""
    weights = load_file(source / ADAPTER_WEIGHTS)
    tensors = {in_peft(str(renamed(without_peft(name)))): tensor for name, tensor in weights.items()}
    config = json.loads((source / ADAPTER).read_text())
    plain = [*map(without_peft, tensors)]
    layers = {name.partition(".lora_")[0].replace(".base_layer", "") for name in plain if ".lora_" in name}
    experts = {name.rpartition(".")[0] for name in config.get("target_parameters") or ()}  # named by their ends
    config["target_modules"] = sorted(name for name in layers if name.rpartition(".")[2] not in experts)
    others = (name for name in plain if ".lora_" not in name and ".token_adapter." not in name)
    config["modules_to_save"] = sorted({name.rpartition(".")[0] for name in others}) or None
    for key in ("rank_pattern", "alpha_pattern", "trainable_token_indices"):
        by_name = config.get(key) or {}
        config[key] = {renamed(name) or name: value for name, value in by_name.items()} or config.get(key)
    save_file(tensors, target / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (target / ADAPTER).write_text(json.dumps(config, indent=2, sort_keys=True))
