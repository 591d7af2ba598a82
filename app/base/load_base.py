"""The base model of transformers: its structure, then where its weights come from."""

import contextlib
import copy
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from app.base.base_weights import Base, LoadOptions, SourceTensor, drawn_parameters, in_memory, random_tensors
from app.base.conversion import FolderReader, quantization_in, require_packed_alike, stored_format, without_scale
from app.base.safetensors_files import is_resized, require_finite, require_float, stored_tensors, with_mean_rows
from app.base.source import fetch_folder, ignored_index, library_errors, read_config, require_weights
from app.base.structure import build, class_in_folder, numbers_in_folder, numbers_in_yaml, text_part_in
from app.config.schema import ModelConfig
from app.config.tasks import Task
from app.errors import ConfigError, EnvironmentProblem, gist
from app.layers.head import in_backbone
from app.layers.quantization import Quantizer
from app.oom_retry import is_out_of_memory

_REMEDY = "Download it again, or give another model.path."


def load_base(
    config: ModelConfig, task: Task, options: LoadOptions, seed: int, quantizer: Quantizer | None = None
) -> Any:
    """A model of transformers with all of its weights; with `quantizer` the backbone in fewer bits."""
    return open_weights(config, task, options, seed, quantizer).whole()


def open_weights(
    config: ModelConfig, task: Task, options: LoadOptions, seed: int, quantizer: Quantizer | None = None
) -> Base:
    """A base whose structure is settled; its weights are filled in later."""
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
    """The base in a local folder. A head for the labels of the run is drawn: see `drawing_by`."""
    lm = _empty(config, task, numbers_in_folder(config, task, folder), options, quantizer)
    stored_as = stored_format(config, read_config(folder, config.path))
    if (folder / "generation_config.json").is_file():  # as from_pretrained does
        with library_errors(f"model.path={config.path}: {folder}/generation_config.json cannot be read", _REMEDY):
            lm.generation_config = transformers.GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    with _readable(config, folder):
        part = text_part_in(config, task, folder, lm)
        reader = FolderReader(lm if part is None else part.whole, stored_tensors(folder), stored_as)
        _require_none_missing(config, task, folder, map("the scale of {}".format, reader.without_scale()))
        found = reader.tensors()
        if part is not None:
            ours = {part.names.of_trained(name): each for name, each in found.items()}
            found = {name: replace(each, name=name) for name, each in ours.items() if name is not None}
        tensors = _one_for_each(config, task, folder, lm, found, options)
    remarks = reader.remarks(None if quantizer is None else quantizer.kind)
    remarks += [f"model: {remark}" for remark in ignored_index(folder)]
    if part is not None:
        remarks.append(f"model: the text part of {type(part.whole).__name__}; what else it reads is not trained")
    base = Base(lm, options, tensors, partial(_readable, config, folder), remarks)
    if quantizer is not None:
        base.quantize(quantizer)
    return base


def _one_for_each(
    config: ModelConfig, task: Task, folder: Path, lm: Any, found: dict[str, SourceTensor], options: LoadOptions
) -> list[SourceTensor]:
    """A tensor for each parameter and stored buffer; a folder without one of them is refused."""
    shared: dict[int, list[str]] = {}  # names of tied parameters
    for name, each in lm.state_dict(keep_vars=True).items():
        shared.setdefault(id(each), []).append(name)
        if name in found and is_resized(config, found[name].shape, each.shape):
            found[name] = _resized(found[name], each.shape)
        elif name in found and found[name].shape != each.shape:
            if in_backbone(lm, name) or not task.has_classes:
                raise ValueError(f"{name} is {tuple(found[name].shape)}, the model has {tuple(each.shape)}")
            del found[name]
    lacking = [names[0] for names in shared.values() if found.keys().isdisjoint(names)]
    drawn = [name for name in lacking if task.has_classes and not in_backbone(lm, name)]
    optional = lm._keys_to_ignore_on_load_missing or ()
    computed = [name for name, _ in lm.named_buffers() if any(re.search(each, name) for each in optional)]
    _require_none_missing(config, task, folder, {*lacking}.difference(drawn, computed))
    for names in shared.values():
        _untie_different(lm, [name for name in names if name in found], found)
    rebuilt = partial(_empty, config, task, lm.config, options, None)
    for place in dict.fromkeys(name.rpartition(".")[0] for name in drawn):
        for last, numbers in drawn_parameters(lm, place, options.device, rebuilt).items():
            name = f"{place}.{last}"
            if name in drawn:
                found[name] = in_memory(name, numbers)
    return list(found.values())


def _resized(tensor: SourceTensor, shape: torch.Size) -> SourceTensor:
    """A tensor with the rows of a larger vocabulary."""

    def rows(low: int, high: int) -> Tensor:
        return tensor.rows(low, high) if high <= tensor.shape[0] else whole()[low:high]

    def whole() -> Tensor:
        return with_mean_rows(tensor.whole(), shape[0])

    return replace(tensor, shape=shape, whole=whole, rows=rows)


def _untie_different(lm: Any, names: list[str], found: dict[str, SourceTensor]) -> None:
    """Of tied parameters that are stored each by itself keep one; those that differ become several, as transformers
    has it.
    """
    for name in names[1:]:
        if found[names[0]].whole().equal(found[name].whole()):
            del found[name]
            continue
        place, _, last = name.rpartition(".")
        module = lm.get_submodule(place)
        module._parameters[last] = nn.Parameter(torch.empty_like(module._parameters[last]))
        for each in names:
            lm.all_tied_weights_keys.pop(each, None)


def _empty(config: ModelConfig, task: Task, numbers: Any, options: LoadOptions, quantizer: Quantizer | None) -> Any:
    """The model with its parameters on meta; what cannot be trained or packed is refused."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):  # buffers are computed
        lm = build(config, task, numbers, options.dtype, options.attention)
    require_packed_alike(config, lm, quantizer)
    vars(lm.config).pop("quantization_config", None)  # what is trained is no longer what is stored
    if quantizer is not None:
        quantizer.require_quantizable(config, lm)
    lm.tie_weights()
    return lm.eval()


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


def read_weights(config: ModelConfig, task: Task, folder: Path, /, **options: Any) -> Any:
    """The model of a local folder, every weight of it from there: transformers would make up the missing ones.

    Only a head for the labels of a run is drawn, where the folder has none of its size: see `drawing_by`.
    """
    if task.has_classes:
        options |= {"config": numbers_in_folder(config, task, folder), "ignore_mismatched_sizes": True}
    quiet_transformers()
    kind = class_in_folder(config, task, folder)
    problem = f"model.path={config.path}: transformers cannot build the model of {folder}/config.json with its weights"
    with _readable(config, folder):
        stored, tensors = read_config(folder, config.path), stored_tensors(folder)
        unscaled = without_scale(stored, tensors)
        _require_none_missing(config, task, folder, map("the scale of {}".format, unscaled))
    with library_errors(problem, _REMEDY):
        lm, found = kind.from_pretrained(
            str(folder),
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    odd = {*found["missing_keys"], *(each[0] for each in found.get("mismatched_keys", ()))}
    missing = {name for name in odd if in_backbone(lm, name) or not task.has_classes}
    _require_none_missing(config, task, folder, missing)
    with _readable(config, folder):
        for name, parameter in lm.named_parameters():
            require_finite(name, parameter)
            if name in tensors and quantization_in(stored) is None:
                require_float(name, tensors[name].dtype, parameter.dtype)
    return lm


def _require_none_missing(config: ModelConfig, task: Task, folder: Path, missing: Iterable[str]) -> None:
    names = sorted(missing)
    if names:
        raise EnvironmentProblem(
            f"model.path={config.path}: the weights in {folder} lack {len(names)} of the model's tensors "
            f"({', '.join(names[:3])}{', ...' if names[3:] else ''}). Give the folder of {task.description}."
        )


@contextlib.contextmanager
def _readable(config: ModelConfig, folder: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, SafetensorError, RuntimeError) as fault:
        if is_out_of_memory(fault):
            raise
        raise EnvironmentProblem(
            f"model.path={config.path}: {folder} cannot be loaded ({gist(fault)}). {_REMEDY}"
        ) from fault
