"""The base model of transformers: its structure, then its weights.

A kind whose files have other names than its modules is loaded whole, by transformers itself; `model.base_weights` fills
all others tensor by tensor.
"""

import contextlib
import copy
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from app.config.schema import ModelConfig
from app.config.tasks import Task
from app.errors import ConfigError, EnvironmentProblem, gist
from app.model.base_weights import Base, LoadOptions, can_be_filled, random_tensors, tensors_in_files
from app.model.head import in_backbone
from app.model.quantization import Quantizer, other_linear_layers
from app.model.safetensors_files import stored_tensors
from app.model.source import fetch_folder, require_weights
from app.model.structure import build, model_class, numbers_in_folder, numbers_in_yaml


def load_base(
    config: ModelConfig, task: Task, options: LoadOptions, seed: int, quantizer: Quantizer | None = None
) -> Any:
    """A model of transformers with all of its weights; with `quantizer` the backbone in fewer bits."""
    return open_base(config, task, options, seed, quantizer).whole()


def open_base(
    config: ModelConfig, task: Task, options: LoadOptions, seed: int, quantizer: Quantizer | None = None
) -> Base:
    """A base whose structure is settled; unless it was loaded whole its weights are filled in later."""
    lack = None if quantizer is None else quantizer.missing_on(options.device)
    if lack is not None:
        raise ConfigError(lack)
    if config.weights == "random":
        empty = partial(_empty, config, task, options=options, quantizer=quantizer)
        lm, another = empty(numbers_in_yaml(config, task)), lambda: empty(numbers_in_yaml(config, task))
        base = Base(lm, options, random_tensors(copy.deepcopy(lm), options.device, seed, another))
        if quantizer is not None:
            base.quantize(quantizer)
        return base
    folder = fetch_folder(config, config.path, with_weights=True)
    require_weights(folder, config.path)
    with drawing_by(seed):
        return open_folder(config, task, folder, options, quantizer)


def open_folder(
    config: ModelConfig, task: Task, folder: Path, options: LoadOptions, quantizer: Quantizer | None
) -> Base:
    """A local folder. What transformers must load is loaded here, by it, packed as it is read where it can."""
    lm = _empty(config, task, numbers_in_folder(config, task, folder), options, quantizer)
    with _readable(config, folder):
        stored = stored_tensors(folder)
    if can_be_filled(lm, stored):
        if (folder / "generation_config.json").is_file():  # as from_pretrained does
            lm.generation_config = transformers.GenerationConfig.from_pretrained(str(folder), local_files_only=True)
        shapes = {name: each.shape for name, each in lm.named_parameters(remove_duplicate=False)}
        base = Base(lm, options, tensors_in_files(stored, shapes), partial(_readable, config, folder))
    else:
        packing = None if quantizer is None else quantizer.transformers_config(other_linear_layers(lm))
        packs = {} if packing is None else {"quantization_config": packing}
        place = {"dtype": options.dtype, "attn_implementation": options.attention}
        lm = read_weights(config, task, folder, device_map={"": options.device}, **place, **packs)
        base = Base(lm.eval(), options)
    if quantizer is not None:
        base.quantize(quantizer)
    return base


def _empty(config: ModelConfig, task: Task, numbers: Any, options: LoadOptions, quantizer: Quantizer | None) -> Any:
    """The model with its parameters on meta; what cannot be trained or packed is refused."""
    with parameters_on_meta():
        lm = build(config, task, numbers, options.dtype, options.attention)
    if quantizer is not None:
        quantizer.require_quantizable(config, lm)
    lm.tie_weights()
    return lm.eval()


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Models that are made inside have no parameters in memory, but the buffers that they compute."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        yield


@contextlib.contextmanager
def drawing_by(seed: int) -> Iterator[None]:
    """Context of a reading that may draw a head; the random numbers of the rest of the program stay the same."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def quiet_transformers() -> None:
    """Silence bars and warnings of models: one line of ours says what is loaded, and a missing weight is refused."""
    transformers.logging.disable_progress_bar()
    logging.getLogger("transformers.modeling_utils").addFilter(_is_no_warning)


def _is_no_warning(record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING


def read_weights(config: ModelConfig, task: Task, folder: Path, **options: Any) -> Any:
    """The model of a local folder, every weight of it from there: transformers would make up the missing ones.

    Only a head for the labels of a run is drawn, where the folder has none of its size: see `drawing_by`.
    """
    if task.pooled:
        options |= {"config": numbers_in_folder(config, task, folder), "ignore_mismatched_sizes": True}
    quiet_transformers()
    with _readable(config, folder):
        lm, found = model_class(task).from_pretrained(
            str(folder),
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    odd = {*found["missing_keys"], *(each[0] for each in found.get("mismatched_keys", ()))}
    missing = sorted(name for name in odd if in_backbone(lm, name) or not task.pooled)
    if missing:
        raise EnvironmentProblem(
            f"model.path={config.path}: the weights in {folder} lack {len(missing)} of the model's tensors "
            f"({', '.join(missing[:3])}{', ...' if missing[3:] else ''}). Give the folder of {task.description}."
        )
    return lm


@contextlib.contextmanager
def _readable(config: ModelConfig, folder: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, SafetensorError, RuntimeError) as fault:
        if isinstance(fault, torch.OutOfMemoryError):
            raise
        raise EnvironmentProblem(
            f"model.path={config.path}: {folder} cannot be loaded ({gist(fault)}). Download it again, or "
            "give another model.path."
        ) from fault
