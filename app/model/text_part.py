"""The text part of a model that reads more than text: its class, and its names in the whole."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from app.config.adapters import ADAPTER, ADAPTER_WEIGHTS
from app.config.tasks import Task
from app.model.adapters import PREFIX

# kinds whose text part computes what the whole does of text alone, as tests show
TEXT_PARTS = ("gemma3", "mistral3")


def text_numbers(numbers: Any, task: Task) -> Any:
    """The configuration of the text part, where that can be trained by itself; else `numbers`."""
    text = numbers.get_text_config(decoder=True)
    if numbers.model_type not in TEXT_PARTS or not task.writes_text:
        return numbers
    text.tie_word_embeddings = numbers.tie_word_embeddings  # the whole decides
    text.dtype = text.dtype or numbers.dtype
    if hasattr(numbers, "quantization_config"):
        text.quantization_config = numbers.quantization_config
    return text


@dataclass(frozen=True, slots=True)
class TextPart:
    """Where the whole, which is on meta, has the modules of its text part."""

    whole: Any
    places: tuple[tuple[str, str], ...]  # names in the text part and in the whole

    @classmethod
    def of(cls, lm: Any, numbers: Any, dtype: torch.dtype) -> "TextPart":
        """`numbers` are those of the whole."""
        with torch.device("meta"):
            whole = getattr(transformers, numbers.architectures[0])._from_config(numbers, dtype=dtype)
        backbone = type(lm.base_model)
        place = next(name for name, module in whole.named_modules() if type(module) is backbone)
        heads = [(child, child) for child, _ in lm.named_children() if child != lm.base_model_prefix]
        return cls(whole, ((lm.base_model_prefix, place), *heads))

    def in_whole(self, name: str) -> str | None:
        return _replaced(name, self.places)

    def in_text(self, name: str) -> str | None:
        return _replaced(name, tuple((there, here) for here, there in self.places))


def _replaced(name: str, places: tuple[tuple[str, str], ...]) -> str | None:
    for old, new in places:
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return None


def rename_adapter(source: Path, target: Path, renamed: Callable[[str], str | None]) -> None:
    """Write an adapter with other names of its layers, all in full: short ones would match other towers too."""
    tensors = {
        f"{PREFIX}{renamed(name.removeprefix(PREFIX))}": each
        for name, each in load_file(source / ADAPTER_WEIGHTS).items()
    }
    config = json.loads((source / ADAPTER).read_text())
    config["target_modules"] = sorted({name.removeprefix(PREFIX).partition(".lora_")[0] for name in tensors})
    save_file(tensors, target / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (target / ADAPTER).write_text(json.dumps(config, indent=2, sort_keys=True))
