"""Base model of a run: its structure from config.json or the numbers in its YAML, then its weights."""

import contextlib
import copy
import logging
import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from app.assets import PREFIX
from app.base.base_weights import Base, LoadOptions, SourceTensor, drawn_parameters, in_memory, random_tensors
from app.base.conversion import (
    BITSANDBYTES,
    FolderReader,
    quantization_in,
    require_packed_alike,
    stored_format,
    without_scale,
)
from app.base.source import (
    fetch_folder,
    folder_at_hand,
    ignored_index,
    library_errors,
    local_place,
    read_config,
    require_layers,
    require_weights,
    whole_numbers,
)
from app.base.supported_models import require_kind, require_structure, tier_of
from app.base.text_part import TextPart, leave_out_towers, text_numbers, whole_class
from app.base.weight_files import Names, is_resized, require_finite, require_float, stored_tensors, with_mean_rows
from app.config.kinds import OWN, PROBLEMS, Tier
from app.config.schema import ModelConfig, TaskConfig
from app.config.tasks import Task, task_of
from app.config.validate import did_you_mean
from app.errors import ConfigError, EnvironmentProblem, gist, refuse
from app.layers.attention import own_attention
from app.layers.experts import stacks_of
from app.layers.head import in_backbone
from app.layers.quantization import Quantizer, backbone_linear_layers, is_linear, other_linear_layers
from app.oom_retry import is_out_of_memory


@dataclass(frozen=True)
class BaseModel:
    """The base for a task. Each fact is found when it is first asked for, and kept."""

    config: ModelConfig
    task: Task
    _on_meta: dict[tuple[str, torch.dtype], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def stored(self) -> dict[str, Any]:
        """What stands in the config.json of the model, or would for random weights."""
        if self.config.weights == "random":
            return self.config.architecture
        stored = read_config(fetch_folder(self.config, self.config.path, with_weights=False), self.config.path)
        stored_format(self.config, stored)
        return stored

    @cached_property
    def numbers(self) -> Any:
        """What transformers makes of its own config.json if that is at hand, else of the YAML."""
        folder = folder_at_hand(self.config) if self.config.weights == "pretrained" else None
        known = self.config, self.task
        return numbers_in_yaml(*known) if folder is None else numbers_in_folder(*known, folder)

    def on_meta(self, attention: str = "eager", dtype: torch.dtype = torch.float32) -> Any:
        """The model without memory or adapter, the same one each time: change a copy of it."""
        if (attention, dtype) not in self._on_meta:
            place = local_place(self.config.path)
            if self.config.weights == "pretrained" and place.is_dir():
                require_weights(place, self.config.path)
            numbers = deepcopy(self.numbers)  # transformers writes attention and dtype into them
            with torch.device("meta"):
                self._on_meta[attention, dtype] = build(self.config, self.task, numbers, dtype, attention)
        return self._on_meta[attention, dtype]

    @cached_property
    def attention_chunk(self) -> int | None:
        """The most tokens of a row where attention is chunked: in documents of one chunk it is full attention."""
        chunked = "chunked_attention" in (getattr(self.numbers, "layer_types", None) or ())
        return int(self.numbers.attention_chunk_size) if chunked else None

    def longest_row(self, wanted: int) -> int:
        """`wanted` tokens, or as many as one chunk and the used positions of the model have."""
        text = self.stored.get("text_config")
        stored = text if isinstance(text, dict) and text else self.stored
        wanted = min(wanted, self.attention_chunk or wanted)
        positions = stored.get("max_position_embeddings") or stored.get("n_positions")
        if not isinstance(positions, int):
            return wanted
        padding = getattr(self.numbers, "pad_token_id", None)  # a bound: no model is built where rows fit anyway
        if wanted <= positions - (0 if padding is None else int(padding) + 1):
            return wanted
        return min(wanted, positions - first_position(self.on_meta()))

    def limit_text(self, longest: int) -> str:
        """Return the limit of a row as a clause, with the name of the model as typed."""
        path = self.config.path
        name = f"model={path.removeprefix(PREFIX)}" if path.startswith(PREFIX) else f"model.path={path}"
        if longest == self.attention_chunk:
            return f"{name} is trained on rows of one attention chunk, {longest:,} tokens at most"
        return f"{name} reads {longest:,} tokens at most"

    def vocabulary(self, largest: int) -> int:
        """How many ids the embedding has a row for; as config.json says it where that holds the `largest` one."""
        told = self.config.vocab_size or self.stored.get("vocab_size")
        if isinstance(told, int) and largest < told:
            return told
        return int(self.on_meta().get_input_embeddings().num_embeddings)

    @property
    def is_resizable(self) -> bool:
        """Whether transformers resizes the vocabulary of its kind in one embedding and its head, and no more."""
        lm = self.on_meta()
        is_plain = type(lm).resize_token_embeddings is transformers.PreTrainedModel.resize_token_embeddings
        return is_plain and bool(lm.get_input_embeddings().num_embeddings == self.numbers.vocab_size)

    @cached_property
    def text_part(self) -> TextPart | None:
        """Where the whole has the model, if that is only its text part."""
        folder = folder_at_hand(self.config) if self.config.weights == "pretrained" else None
        return None if folder is None else text_part_in(self.config, self.task, folder, self.on_meta())

    @property
    def names(self) -> Names:
        """Names of the weights in the folder's model and in files."""
        return Names() if self.text_part is None else self.text_part.names

    @property
    def folder_model(self) -> Any:
        """The folder's own model on meta: the trained model, or the composite that contains it."""
        return self.on_meta() if self.text_part is None else self.text_part.whole

    @property
    def unpacked_format(self) -> dict[str, Any] | None:
        """The quantized format of the folder's weights, where they are unpacked as they are read."""
        given = stored_format(self.config, self.stored)
        return None if given is None or given["quant_method"] == BITSANDBYTES else given

    @property
    def auto_class(self) -> str:
        """The class of transformers by which other programs load the folder."""
        return self.task.auto_class if self.text_part is None else type(self.text_part.whole).__name__

    @property
    def linear_outside(self) -> list[str]:
        """Names, in the folder's own model, of linear layers that quantization leaves as they are."""
        lm, part = self.on_meta(), self.text_part
        if part is None:
            return other_linear_layers(lm)
        inside = backbone_linear_layers(lm)
        named = part.whole.named_modules()
        return [name for name, layer in named if is_linear(layer) and part.names.of_trained(name) not in inside]

    @property
    def stacks_of_experts(self) -> list[str]:
        """Names of stacks of experts in the folder's own model."""
        return [*map(self.names.of_folder, stacks_of(self.on_meta()))]

    @cached_property
    def is_bidirectional(self) -> bool:
        """Whether tokens attend to those after them; the model decides where the task takes either."""
        if self.task.sees != "either":
            return self.task.sees == "both"
        told = [module.is_causal for module in self.on_meta().modules() if hasattr(module, "is_causal")]
        return not any(told) if told else type(self.numbers) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING

    @cached_property
    def tier(self) -> Tier:
        """How it is trained, as far as its configuration tells."""
        return tier_of(self.config, self.task, self.numbers)


def open_base(model: ModelConfig, task: TaskConfig) -> BaseModel:
    """Return the base of a run for its task; only config.json is read."""
    return BaseModel(model, task_of(task))


def numbers_in_yaml(config: ModelConfig, task: Task) -> Any:
    """The configuration of transformers for the architecture in the YAML."""
    from huggingface_hub.errors import StrictDataclassError

    numbers = dict(config.architecture)
    kind = str(numbers.pop("model_type", None))
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"model.architecture.model_type={kind}: unknown model type of transformers."
            f"{did_you_mean(kind, sorted(transformers.CONFIG_MAPPING))}"
        )
    refuse(
        f"model.architecture.{own}={numbers[own]} and model.architecture.{name}={numbers[name]} are the same "
        f"setting of model_type={kind}. Leave {own} out and set model.architecture.{name}."
        for name, own in transformers.CONFIG_MAPPING[
            kind
        ].attribute_map.items()  # of two names transformers would take one
        if name in numbers and own in numbers and numbers[name] != numbers[own]
    )
    require_layers(numbers, "model.architecture:")
    try:
        return _configured(config, task, text_numbers(transformers.AutoConfig.for_model(kind, **numbers), task))
    except (ValueError, TypeError, KeyError, StrictDataclassError) as fault:
        reason = gist(fault.__cause__ or fault)
        raise ConfigError(f"model.architecture (model_type: {kind}) is rejected by transformers: {reason}") from fault


def numbers_in_folder(config: ModelConfig, task: Task, folder: Path) -> Any:
    """The configuration of transformers in a local folder, or of its text part, for the labels of the run."""
    quantized = stored_format(config, read_config(folder, config.path))
    numbers = text_numbers(whole_numbers(config, folder), task)
    _require_no_other_classes(config, task, numbers)
    if quantized is not None and quantized["quant_method"] != BITSANDBYTES:
        vars(numbers).pop("quantization_config", None)  # the weights are unpacked as they are read
    return _configured(config, task, numbers)


def text_part_in(config: ModelConfig, task: Task, folder: Path, lm: Any) -> TextPart | None:
    """Where the whole of a folder has `lm`, if that is only its text part."""
    return TextPart.of(lm, whole_numbers(config, folder), task)


def names_in(config: ModelConfig, task: Task, folder: Path, lm: Any) -> Names:
    """Return the names of the weights of `lm` in a local folder."""
    part = text_part_in(config, task, folder, lm)
    return Names() if part is None else part.names


def class_in_folder(config: ModelConfig, task: Task, folder: Path) -> Any:
    """The class of transformers that loads a local folder, towers included."""
    return whole_class(whole_numbers(config, folder), task) or model_class(task)


def _require_no_other_classes(config: ModelConfig, task: Task, numbers: Any) -> None:
    """Refuse a classifier of equally many other classes: its head would be reused; of another size one is drawn."""
    suffix = task.auto_class.removeprefix("AutoModel")
    names = task.has_classes and (task.problem is None or PROBLEMS[task.problem].named)
    is_classifier = names and any(suffix in name for name in numbers.architectures or ())
    known = [str(numbers.id2label[at]) for at in sorted(numbers.id2label)] if is_classifier else []
    if task.labels and len(known) == len(task.labels) and known != list(task.labels):
        raise ConfigError(
            f"model.path={config.path}: it already has a classifier with the labels {', '.join(known)}, but the "
            f"labels of this run are {', '.join(task.labels)}. Use its base model, or rows with its labels and "
            f"task.labels=[{','.join(known)}]."
        )


def _configured(config: ModelConfig, task: Task, numbers: Any) -> Any:
    """The configuration with the labels and the vocabulary of the run."""
    rows = getattr(numbers, "vocab_size", None) or 0
    if config.vocab_size is not None and config.vocab_size < rows:
        raise ConfigError(
            f"model.vocab_size={config.vocab_size}: the base has {rows} embedding rows, and none are removed. "
            f"Set model.vocab_size={rows} or more, or null."
        )
    if config.vocab_size is not None:
        numbers.vocab_size = config.vocab_size
    if task.labels:
        numbers.id2label = dict(enumerate(task.labels))
        numbers.label2id = {label: at for at, label in enumerate(task.labels)}
        numbers.problem_type = None if task.problem is None else PROBLEMS[task.problem].problem_type
    if task.pooled and hasattr(numbers, "classifier_pooling"):
        # the classifier is new: nothing has learnt the mean of all tokens
        numbers.classifier_pooling = "bos" if type(numbers).classifier_pooling == "late" else "cls"
    return numbers


def model_class(task: Task) -> Any:
    """The auto class of transformers that builds the task's models."""
    return getattr(transformers, task.auto_class)


def build(config: ModelConfig, task: Task, numbers: Any, dtype: torch.dtype, attention: str) -> Any:
    """The model of the task's class, where torch puts new modules; what cannot be trained is refused."""
    require_kind(config, task, numbers)
    # of each fast kernel that is not installed, on its first use: one line of `model.build` names all of them
    logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    whole, given = whole_class(numbers, task), {"dtype": dtype, "attn_implementation": attention}
    given |= {"attn_implementation": "eager"} if attention == OWN else {}
    place = "model.architecture" if config.weights == "random" else f"model.path={config.path}: config.json"
    with library_errors(f"{place}: transformers cannot build this model", "Fix its value, or choose another model."):
        if whole is None:
            lm = model_class(task).from_config(numbers, trust_remote_code=config.trust_remote_code, **given)
        else:
            lm = whole._from_config(numbers, **given)
    if whole is not None:
        leave_out_towers(lm)
    if attention == OWN:
        lm.set_attn_implementation(own_attention(lm))
    if lm.base_model is lm and hasattr(lm, "model"):  # where the class names that of the whole that it is a part of
        lm.base_model_prefix = "model"
    require_structure(config, task, lm)
    in_fp32 = re.compile("|".join(lm._get_dtype_plan(dtype)) or "(?!)")  # whatever the dtype of the others is
    for name, each in lm.state_dict(keep_vars=True).items():
        if in_fp32.search(name):
            each.data = each.data.float()
    return lm


def first_position(lm: Any) -> int:
    """RoBERTa and its kin leave the places up to that of their padding token unused."""
    tables = (module for name, module in lm.base_model.named_modules() if name.endswith("position_embeddings"))
    places = [table.padding_idx for table in tables if isinstance(table, nn.Embedding)]
    return 0 if not places or places[0] is None else int(places[0]) + 1


# ---- load base


_REMEDY = "Download it again, or set another model.path."


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
        remarks.append(
            f"model: training the text part of {type(part.whole).__name__}; its other inputs are not trained"
        )
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
    vars(lm.config).pop("quantization_config", None)  # trained weights are no longer quantized
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
    """Turn off bars and warnings of transformers: one line of ours reports loading; missing weights are refused."""
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
            f"({', '.join(names[:3])}{', ...' if names[3:] else ''}). Set model.path to {task.description}."
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
