"""The finished model as files that the ordinary tools load."""

import copy
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from app.model.training_model import TrainingModel

State = dict[str, Tensor]


def save_model(
    training_model: TrainingModel, tokenizer: Any, folder: Path, state: State | None = None
) -> None:
    """An adapter in PEFT's format, or a whole model in transformers' format, with the tokenizer beside it. `state`:
    whole tensors of what is saved, where the model has parts of them only.
    """
    network: Any = training_model.network
    lm = training_model.language_model
    if (
        training_model.pooled and lm.config.pad_token_id is None
    ):  # without it transformers answers one text at a time
        lm.config.pad_token_id = tokenizer.pad_token_id
    given: dict[str, Any] = {} if state is None else {"state_dict": state}
    if training_model.network is training_model.language_model:
        _save_pretrained(network, folder, **given)
    else:
        # "auto" would ask the hub about the vocabulary of the base
        network.save_pretrained(str(folder), save_embedding_layers=False, **given)
        if training_model.pooled:
            _save_classes(lm, folder)
    tokenizer.save_pretrained(str(folder))


def _save_classes(lm: Any, folder: Path) -> None:
    """The configuration with which the base is loaded: names and number of the classes are nowhere else."""
    numbers = copy.deepcopy(lm.config)
    numbers.architectures = [type(lm).__name__]
    if hasattr(numbers, "quantization_config"):  # how the base is held is for whoever loads it to say
        del numbers.quantization_config
    numbers.save_pretrained(str(folder))


def save_base(
    training_model: TrainingModel,
    tokenizer: Any,
    folder: Path,
    unpacked: nn.Module | None = None,
    state: State | None = None,
) -> None:
    """A base of random weights, as it was before any adapter: nothing else could make it again.

    Of a quantised one the `unpacked` weights are kept: any tool reads them, and packed again they give the same bytes.
    """
    if unpacked is None:
        lm = training_model.language_model
        known = lm.state_dict() if state is None else state
        kept = {name: tensor for name, tensor in known.items() if _is_of_base(name)}
        plain = {_without_adapter(name): tensor for name, tensor in kept.items()}
        _save_pretrained(lm, folder, state_dict=plain)
    else:
        _save_pretrained(unpacked, folder)
    tokenizer.save_pretrained(str(folder))


def _save_pretrained(lm: nn.Module, folder: Path, **options: Any) -> None:
    lm.save_pretrained(str(folder), **options)  # type: ignore[operator]


def _is_of_base(name: str) -> bool:
    return ".lora_" not in name and ".modules_to_save." not in name


def _without_adapter(name: str) -> str:
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")
