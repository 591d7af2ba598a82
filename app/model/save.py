"""The finished model as files that the ordinary tools load."""

from pathlib import Path
from typing import Any

from torch import nn

from app.model.trainee import Trainee


def save_model(trainee: Trainee, tokenizer: Any, folder: Path) -> None:
    """An adapter in PEFT's format, or a whole model in transformers' format, with the tokenizer beside it."""
    network: Any = trainee.network
    if trainee.network is trainee.language_model:
        _save_pretrained(network, folder)
    else:
        # "auto" would ask the hub about the vocabulary of the base
        network.save_pretrained(str(folder), save_embedding_layers=False)
    tokenizer.save_pretrained(str(folder))


def save_base(trainee: Trainee, tokenizer: Any, folder: Path, unpacked: nn.Module | None = None) -> None:
    """A base of random weights, as it was before any adapter: nothing else could make it again.

    Of a quantised one the `unpacked` weights are kept: any tool reads them, and packed again they give the same bytes.
    """
    if unpacked is None:
        lm = trainee.language_model
        plain = {
            _without_adapter(name): tensor for name, tensor in lm.state_dict().items() if ".lora_" not in name
        }
        _save_pretrained(lm, folder, state_dict=plain)
    else:
        _save_pretrained(unpacked, folder)
    tokenizer.save_pretrained(str(folder))


def _save_pretrained(lm: nn.Module, folder: Path, **options: Any) -> None:
    lm.save_pretrained(str(folder), **options)  # type: ignore[operator]


def _without_adapter(name: str) -> str:
    return name.replace(".base_layer.", ".")
