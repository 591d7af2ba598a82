"""The base model of transformers: its structure from config.json or from the numbers in its YAML, then its weights.

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

from app.config.did_you_mean import did_you_mean
from app.config.schema import ModelConfig
from app.config.tasks import Task
from app.errors import ConfigError, EnvironmentProblem, gist
from app.model.base_weights import Base, LoadOptions, can_be_filled, random_tensors, tensors_in_files
from app.model.head import in_backbone
from app.model.quantization import Quantizer, other_linear_layers
from app.model.safetensors_files import stored_tensors
from app.model.source import REMOTE_CODE, fetch_folder, folder_at_hand, local_place, require_config, require_weights
from app.model.supported_models import require_kind, require_structure
from app.model.tasks import configured, model_class


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
        lm = _empty(config, task, _numbers(config, task), options, quantizer)
        base = Base(lm, options, random_tensors(copy.deepcopy(lm), options.device, seed))
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
    lm = _empty(config, task, _numbers_of(config, task, folder), options, quantizer)
    with _readable(config, folder):
        stored = stored_tensors(folder)
    if can_be_filled(lm, stored):
        _take_generation_settings(lm, folder)
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
    require_kind(config, task, numbers)
    with parameters_on_meta():
        lm = _from_config(config, task, numbers, options.dtype, options.attention)
    require_structure(config, task, lm)
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


def _take_generation_settings(lm: Any, folder: Path) -> None:
    """As from_pretrained does: they are no part of the model's own numbers."""
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        lm.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)


def build_on_meta(config: ModelConfig, task: Task, attention: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model without memory, for counting: from its own config.json if it is at hand, else from the YAML."""
    place = local_place(config.path)
    if config.weights == "pretrained" and place.is_dir():
        require_weights(place, config.path)
    numbers = numbers_at_hand(config, task)
    require_kind(config, task, numbers)
    with torch.device("meta"):
        lm = _from_config(config, task, numbers, dtype, attention)
    require_structure(config, task, lm)
    return lm


def numbers_at_hand(config: ModelConfig, task: Task) -> Any:
    """What transformers makes of its own config.json if that is at hand, else of the YAML."""
    folder = folder_at_hand(config) if config.weights == "pretrained" else None
    return _numbers(config, task) if folder is None else _numbers_of(config, task, folder)


def _numbers(config: ModelConfig, task: Task) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    numbers = dict(config.architecture)
    kind = str(numbers.pop("model_type", None))
    if kind not in CONFIG_MAPPING:
        raise ConfigError(
            f"model.architecture.model_type={kind} is not a kind that transformers knows."
            f"{did_you_mean(kind, sorted(CONFIG_MAPPING))}"
        )
    problems = [
        f"model.architecture.{own}={numbers[own]} and model.architecture.{name}={numbers[name]} are one number of "
        f"model_type={kind}. Leave {own} out, and set model.architecture.{name}."
        for name, own in CONFIG_MAPPING[kind].attribute_map.items()  # of two names transformers would take one
        if name in numbers and own in numbers and numbers[name] != numbers[own]
    ]
    if problems:
        raise ConfigError(problems)
    try:
        return configured(task, AutoConfig.for_model(kind, **numbers))
    except (ValueError, TypeError, KeyError, StrictDataclassError) as fault:
        reason = gist(fault.__cause__ or fault)
        raise ConfigError(
            f"model.architecture (model_type: {kind}) is not what transformers takes: {reason}"
        ) from fault


def _numbers_of(config: ModelConfig, task: Task, folder: Path) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    require_config(folder, config.path)
    try:
        numbers = AutoConfig.from_pretrained(
            str(folder), trust_remote_code=config.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as fault:
        raise EnvironmentProblem(
            f"model.path={config.path}: {folder / 'config.json'} is not a configuration that this transformers can "
            f"use ({gist(fault)}). {REMOTE_CODE}"
        ) from fault
    _require_no_other_classes(config, task, numbers)
    return configured(task, numbers)


def _require_no_other_classes(config: ModelConfig, task: Task, numbers: Any) -> None:
    """As many classes of other names would be taken for those of the run; one of another size is drawn anew."""
    is_classifier = any("ForSequenceClassification" in name for name in numbers.architectures or ())
    known = [str(numbers.id2label[at]) for at in sorted(numbers.id2label)] if is_classifier else []
    if task.labels and len(known) == len(task.labels) and known != list(task.labels):
        raise ConfigError(
            f"model.path={config.path}: it has a classifier already, of {', '.join(known)}, and the labels of this run "
            f"are {', '.join(task.labels)}. Give the model that it was made from, or rows with its labels and "
            f"task.labels=[{','.join(known)}]."
        )


def stored_dtype(config: ModelConfig, task: Task, folder: Path) -> torch.dtype:
    """What the folder says its weights are in."""
    return getattr(_numbers_of(config, task, folder), "dtype", None) or torch.float32


def _from_config(config: ModelConfig, task: Task, numbers: Any, dtype: torch.dtype, attention: str) -> Any:
    return model_class(task).from_config(
        numbers, dtype=dtype, attn_implementation=attention, trust_remote_code=config.trust_remote_code
    )


@contextlib.contextmanager
def drawing_by(seed: int) -> Iterator[None]:
    """Around a reading that may draw a head. What the rest of the program draws stays what it was."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def quiet_transformers() -> None:
    """Silence bars and warnings of models: one line of ours says what is loaded, and a missing weight is refused."""
    import transformers

    transformers.logging.disable_progress_bar()
    logging.getLogger("transformers.modeling_utils").addFilter(_is_no_warning)


def _is_no_warning(record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING


def read_weights(config: ModelConfig, task: Task, folder: Path, **options: Any) -> Any:
    """The model of a local folder, every weight of it from there: transformers would make up the missing ones.

    Only a head for the labels of a run is drawn, where the folder has none of its size: see `drawing_by`.
    """
    if task.pooled:
        options |= {"config": _numbers_of(config, task, folder), "ignore_mismatched_sizes": True}
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
