"""Base model of a run: structure from config.json or from the architecture in YAML, then weights."""

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
    require_all_packed,
    require_packed_alike,
    stored_format,
    without_scale,
)
from app.base.packed_weights import PACKED_FORMATS, with_plain_weights
from app.base.rope import require_scaled, rope_of, scale_rope
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
    """The base model for a task. Properties are computed on first use and cached."""

    config: ModelConfig
    task: Task
    _on_meta: dict[tuple[str, torch.dtype], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def stored(self) -> dict[str, Any]:
        """The content of config.json; for random weights the architecture in YAML."""
        if self.config.weights == "random":
            return self.config.architecture
        stored = read_config(fetch_folder(self.config, self.config.path, with_weights=False), self.config.path)
        stored_format(self.config, stored)
        return stored

    @cached_property
    def numbers(self) -> Any:
        """The transformers configuration from a local config.json, else from the architecture in YAML."""
        folder = folder_at_hand(self.config) if self.config.weights == "pretrained" else None
        if folder is None:
            return numbers_in_yaml(self.config, self.task)
        return numbers_in_folder(self.config, self.task, folder)

    def on_meta(self, attention: str = "eager", dtype: torch.dtype = torch.float32) -> Any:
        """Return the model on meta, without adapter. It is cached: change only a copy."""
        if (attention, dtype) not in self._on_meta:
            place = local_place(self.config.path)
            if self.config.weights == "pretrained" and place.is_dir():
                require_weights(place, self.config.path)
            numbers = deepcopy(self.numbers)  # transformers stores attention and dtype in them
            with torch.device("meta"):
                self._on_meta[attention, dtype] = build(self.config, self.task, numbers, dtype, attention)
        return self._on_meta[attention, dtype]

    @cached_property
    def attention_chunk(self) -> int | None:
        """The maximum row length with chunked attention: within one chunk it equals full attention."""
        chunked = "chunked_attention" in (getattr(self.numbers, "layer_types", None) or ())
        return int(self.numbers.attention_chunk_size) if chunked else None

    def longest_row(self, length: int) -> int:
        """Return `length`, at most one attention chunk and the usable positions of the model."""
        length, positions = min(length, self.attention_chunk or length), self._positions
        if not isinstance(positions, int):
            return length
        padding = getattr(self.numbers, "pad_token_id", None)  # a bound: no model is built if rows fit anyway
        if length <= positions - (0 if padding is None else int(padding) + 1):
            return length
        return min(length, positions - first_position(self.on_meta()))

    @property
    def _positions(self) -> Any:
        """Positions in config.json, or those with `model.rope`."""
        text = self.stored.get("text_config")
        stored = text if isinstance(text, dict) and text else self.stored
        stored = {**stored, **(self.rope or {})}
        return stored.get("max_position_embeddings") or stored.get("n_positions")

    @property
    def rope(self) -> dict[str, Any] | None:
        """Values of config.json that differ from the base with `model.rope`, which an adapter does not store."""
        return None if self.config.rope == OWN else rope_of(self.numbers)

    def limit_text(self, longest: int) -> str:
        """Return the row length limit as a clause, with the model as typed."""
        path = self.config.path
        name = f"model={path.removeprefix(PREFIX)}" if path.startswith(PREFIX) else f"model.path={path}"
        if longest == self.attention_chunk:
            return f"{name} is trained on rows of one attention chunk, {longest:,} tokens at most"
        return f"{name} reads {longest:,} tokens at most"

    def vocabulary(self, largest: int) -> int:
        """Return the number of embedding rows; that in config.json if it is above the `largest` id."""
        size = self.config.vocab_size or self.stored.get("vocab_size")
        if isinstance(size, int) and largest < size:
            return size
        return int(self.on_meta().get_input_embeddings().num_embeddings)

    @property
    def is_resizable(self) -> bool:
        """Whether resizing the vocabulary changes only one embedding and its head in transformers."""
        lm = self.on_meta()
        is_plain = type(lm).resize_token_embeddings is transformers.PreTrainedModel.resize_token_embeddings
        return is_plain and bool(lm.get_input_embeddings().num_embeddings == self.numbers.vocab_size)

    @cached_property
    def text_part(self) -> TextPart | None:
        """The text part of the composite in the folder, if only that is trained."""
        folder = folder_at_hand(self.config) if self.config.weights == "pretrained" else None
        return None if folder is None else text_part_in(self.config, self.task, folder, self.on_meta())

    @property
    def names(self) -> Names:
        """Weight names in the folder's model and in files."""
        return Names() if self.text_part is None else self.text_part.names

    @property
    def folder_model(self) -> Any:
        """The folder's own model on meta: the trained model, or the composite that contains it."""
        return self.on_meta() if self.text_part is None else self.text_part.whole

    @property
    def unpacked_format(self) -> dict[str, Any] | None:
        """The quantized format of the folder's weights, if they are dequantized while loading."""
        quantization = stored_format(self.config, self.stored)
        return None if quantization is None or quantization["quant_method"] == BITSANDBYTES else quantization

    @property
    def auto_class(self) -> str:
        """The transformers class with which other programs load the folder."""
        return self.task.auto_class if self.text_part is None else type(self.text_part.whole).__name__

    @property
    def linear_outside(self) -> list[str]:
        """Names in the folder's own model of linear layers that are not quantized."""
        lm, part = self.on_meta(), self.text_part
        if part is None:
            return other_linear_layers(lm)
        inside = backbone_linear_layers(lm)
        named = part.whole.named_modules()
        return [name for name, layer in named if is_linear(layer) and part.names.of_trained(name) not in inside]

    @property
    def stacks_of_experts(self) -> list[str]:
        """Names of expert stacks in the folder's own model."""
        return [*map(self.names.of_folder, stacks_of(self.on_meta()))]

    @cached_property
    def is_bidirectional(self) -> bool:
        """Whether tokens attend to later ones; the model decides if the task supports both."""
        if self.task.sees != "either":
            return self.task.sees == "both"
        flags = [module.is_causal for module in self.on_meta().modules() if hasattr(module, "is_causal")]
        return not any(flags) if flags else type(self.numbers) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING

    @cached_property
    def tier(self) -> Tier:
        """How the model is trained, as far as its configuration shows."""
        return tier_of(self.config, self.task, self.numbers)


def open_base(model: ModelConfig, task: TaskConfig) -> BaseModel:
    """Return the base of a run for its task; only config.json is read."""
    return BaseModel(model, task_of(task))


def numbers_in_yaml(config: ModelConfig, task: Task) -> Any:
    """Return the transformers configuration for the architecture in YAML."""
    from huggingface_hub.errors import StrictDataclassError

    numbers = dict(config.architecture)
    kind = str(numbers.pop("model_type", None))
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"model.architecture.model_type={kind}: unknown model type of transformers."
            f"{did_you_mean(kind, sorted(transformers.CONFIG_MAPPING))}"
        )
    refuse(
        f"model.architecture.{alias}={numbers[alias]} and model.architecture.{name}={numbers[name]} are the same "
        f"setting of model_type={kind}. Leave {alias} out and set model.architecture.{name}."
        # of two names transformers would use one
        for name, alias in transformers.CONFIG_MAPPING[kind].attribute_map.items()
        if name in numbers and alias in numbers and numbers[name] != numbers[alias]
    )
    require_layers(numbers, "model.architecture:")
    try:
        return _configured(config, task, text_numbers(transformers.AutoConfig.for_model(kind, **numbers), task))
    except (ValueError, TypeError, KeyError, StrictDataclassError) as fault:
        reason = gist(fault.__cause__ or fault)
        raise ConfigError(f"model.architecture (model_type: {kind}) is rejected by transformers: {reason}") from fault


def numbers_in_folder(config: ModelConfig, task: Task, folder: Path) -> Any:
    """Return the transformers configuration of a local folder or its text part, with the labels of the run."""
    quantized = stored_format(config, read_config(folder, config.path))
    numbers = text_numbers(whole_numbers(config, folder), task)
    _require_no_other_classes(config, task, numbers)
    if quantized is not None and quantized["quant_method"] not in (BITSANDBYTES, *PACKED_FORMATS):
        vars(numbers).pop("quantization_config", None)  # the weights are dequantized while loading
    return _configured(config, task, numbers)


def text_part_in(config: ModelConfig, task: Task, folder: Path, lm: Any) -> TextPart | None:
    """Return the position of `lm` in the composite of a folder; None if `lm` is the whole model."""
    return TextPart.of(lm, whole_numbers(config, folder), task)


def names_in(config: ModelConfig, task: Task, folder: Path, lm: Any) -> Names:
    """Return the names of the weights of `lm` in a local folder."""
    part = text_part_in(config, task, folder, lm)
    return Names() if part is None else part.names


def class_in_folder(config: ModelConfig, task: Task, folder: Path) -> Any:
    """Return the transformers class that loads a local folder, other towers included."""
    return whole_class(whole_numbers(config, folder), task) or model_class(task)


def _require_no_other_classes(config: ModelConfig, task: Task, numbers: Any) -> None:
    """Refuse a classifier with as many other classes: its head would be reused. Heads of other sizes are replaced."""
    suffix = task.auto_class.removeprefix("AutoModel")
    names = task.has_classes and (task.problem is None or PROBLEMS[task.problem].named)
    is_classifier = names and any(suffix in name for name in numbers.architectures or ())
    labels = [str(numbers.id2label[at]) for at in sorted(numbers.id2label)] if is_classifier else []
    if task.labels and len(labels) == len(task.labels) and labels != list(task.labels):
        raise ConfigError(
            f"model.path={config.path}: it already has a classifier with the labels {', '.join(labels)}, but the "
            f"labels of this run are {', '.join(task.labels)}. Use its base model, or rows with its labels and "
            f"task.labels=[{','.join(labels)}]."
        )


def _configured(config: ModelConfig, task: Task, numbers: Any) -> Any:
    """Return `numbers` with the labels, the vocabulary size and the RoPE of the run."""
    rows = getattr(numbers, "vocab_size", None) or 0
    if config.vocab_size is not None and config.vocab_size < rows:
        raise ConfigError(
            f"model.vocab_size={config.vocab_size}: the base has {rows} embedding rows, and none are removed. "
            f"Set model.vocab_size={rows} or more, or null."
        )
    if config.vocab_size is not None:
        numbers.vocab_size = config.vocab_size
    scale_rope(config, numbers)
    if task.labels:
        numbers.id2label = dict(enumerate(task.labels))
        numbers.label2id = {label: at for at, label in enumerate(task.labels)}
        numbers.problem_type = None if task.problem is None else PROBLEMS[task.problem].problem_type
    if task.pooled and hasattr(numbers, "classifier_pooling"):
        # the classifier is new: nothing is trained on the mean of all tokens
        numbers.classifier_pooling = "bos" if type(numbers).classifier_pooling == "late" else "cls"
    return numbers


def model_class(task: Task) -> Any:
    """Return the auto class of transformers for the task."""
    return getattr(transformers, task.auto_class)


def build(config: ModelConfig, task: Task, numbers: Any, dtype: torch.dtype, attention: str) -> Any:
    """Build the model of the task's class on the default device; refuse a kind that cannot be trained."""
    require_kind(config, task, numbers)
    # silence the warning for each fast kernel that is not installed: one line of `model.build` names all of them
    logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    whole, options = whole_class(numbers, task), {"dtype": dtype, "attn_implementation": attention}
    options |= {"attn_implementation": "eager"} if attention == OWN else {}
    place = "model.architecture" if config.weights == "random" else f"model.path={config.path}: config.json"
    with library_errors(f"{place}: transformers cannot build this model", "Fix its value, or choose another model."):
        if whole is None:
            lm = model_class(task).from_config(numbers, trust_remote_code=config.trust_remote_code, **options)
        else:
            lm = whole._from_config(numbers, **options)
    if whole is not None:
        leave_out_towers(lm)
    if attention == OWN:
        lm.set_attn_implementation(own_attention(lm))
    if lm.base_model is lm and hasattr(lm, "model"):  # the class may have the prefix of its composite
        lm.base_model_prefix = "model"
    require_structure(config, task, lm)
    require_scaled(config, lm)
    in_fp32 = re.compile("|".join(lm._get_dtype_plan(dtype)) or "(?!)")  # with any `dtype`
    for name, tensor in lm.state_dict(keep_vars=True).items():
        if in_fp32.search(name):
            tensor.data = tensor.data.float()
    return lm


def first_position(lm: Any) -> int:
    """Return the first usable position: RoBERTa and similar models skip those up to the padding id."""
    tables = (module for name, module in lm.base_model.named_modules() if name.endswith("position_embeddings"))
    places = [table.padding_idx for table in tables if isinstance(table, nn.Embedding)]
    return 0 if not places or places[0] is None else int(places[0]) + 1


# ---- load base


_REMEDY = "Download it again, or set another model.path."


def load_base(
    config: ModelConfig, task: Task, options: LoadOptions, seed: int, quantizer: Quantizer | None = None
) -> Any:
    """Return a transformers model with all weights; with `quantizer` the backbone is quantized."""
    return open_weights(config, task, options, seed, quantizer).whole()


def open_weights(
    config: ModelConfig, task: Task, options: LoadOptions, seed: int, quantizer: Quantizer | None = None
) -> Base:
    """Return a base with its structure built; its weights are loaded later."""
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
    """Return the base in a local folder. A head for the labels of the run is initialized: see `drawing_by`."""
    lm = _empty(config, task, numbers_in_folder(config, task, folder), options, quantizer)
    stored_as = stored_format(config, read_config(folder, config.path))
    if (folder / "generation_config.json").is_file():  # as from_pretrained does
        with library_errors(f"model.path={config.path}: {folder}/generation_config.json cannot be read", _REMEDY):
            lm.generation_config = transformers.GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    with _readable(config, folder):
        part = text_part_in(config, task, folder, lm)
        stored = with_plain_weights(stored_tensors(folder), stored_as)
        reader = FolderReader(lm if part is None else part.whole, stored, stored_as)
        _require_none_missing(config, task, folder, map("the scale of {}".format, reader.without_scale()))
        tensors = reader.tensors()
        if part is not None:
            renamed = {part.names.of_trained(name): tensor for name, tensor in tensors.items()}
            tensors = {name: replace(tensor, name=name) for name, tensor in renamed.items() if name is not None}
        matched = _tensor_per_parameter(config, task, folder, lm, tensors, options)
    remarks = reader.remarks(None if quantizer is None else quantizer.kind)
    remarks += [f"model: {remark}" for remark in ignored_index(folder)]
    if part is not None:
        remarks.append(
            f"model: training the text part of {type(part.whole).__name__}; its other inputs are not trained"
        )
    base = Base(lm, options, matched, partial(_readable, config, folder), remarks)
    if quantizer is not None:
        weights = {f"{name}.weight" for name in quantizer.layers(lm)}.union(
            stacks_of(lm) if quantizer.packs_experts else ()
        )
        require_all_packed(config, (tensor for tensor in matched if tensor.name in weights), quantizer)
        base.quantize(quantizer)
    return base


def _tensor_per_parameter(
    config: ModelConfig, task: Task, folder: Path, lm: Any, tensors: dict[str, SourceTensor], options: LoadOptions
) -> list[SourceTensor]:
    """Return a tensor for each parameter and stored buffer; refuse a folder that lacks one."""
    shared: dict[int, list[str]] = {}  # names of tied parameters
    for name, parameter in lm.state_dict(keep_vars=True).items():
        shared.setdefault(id(parameter), []).append(name)
        if name in tensors and is_resized(config, tensors[name].shape, parameter.shape):
            tensors[name] = _resized(tensors[name], parameter.shape)
        elif name in tensors and tensors[name].shape != parameter.shape:
            if in_backbone(lm, name) or not task.has_classes:
                raise ValueError(f"{name} is {tuple(tensors[name].shape)}, the model has {tuple(parameter.shape)}")
            del tensors[name]
    lacking = [names[0] for names in shared.values() if tensors.keys().isdisjoint(names)]
    drawn = [name for name in lacking if task.has_classes and not in_backbone(lm, name)]
    optional = lm._keys_to_ignore_on_load_missing or ()
    computed = [name for name, _ in lm.named_buffers() if any(re.search(pattern, name) for pattern in optional)]
    _require_none_missing(config, task, folder, {*lacking}.difference(drawn, computed))
    for names in shared.values():
        _untie_different(lm, [name for name in names if name in tensors], tensors)
    rebuilt = partial(_empty, config, task, lm.config, options, None)
    for place in dict.fromkeys(name.rpartition(".")[0] for name in drawn):
        for last, numbers in drawn_parameters(lm, place, options.device, rebuilt).items():
            name = f"{place}.{last}"
            if name in drawn:
                tensors[name] = in_memory(name, numbers)
    return list(tensors.values())


def _resized(tensor: SourceTensor, shape: torch.Size) -> SourceTensor:
    """Return a tensor with the rows of a larger vocabulary."""

    def rows(low: int, high: int) -> Tensor:
        return tensor.rows(low, high) if high <= tensor.shape[0] else whole()[low:high]

    def whole() -> Tensor:
        return with_mean_rows(tensor.whole(), shape[0])

    return replace(tensor, shape=shape, whole=whole, rows=rows)


def _untie_different(lm: Any, names: list[str], tensors: dict[str, SourceTensor]) -> None:
    """Untie parameters that the files store with different values, as transformers does; drop equal ones from
    `tensors`.
    """
    for name in names[1:]:
        if tensors[names[0]].whole().equal(tensors[name].whole()):
            del tensors[name]
            continue
        place, _, last = name.rpartition(".")
        module = lm.get_submodule(place)
        module._parameters[last] = nn.Parameter(torch.empty_like(module._parameters[last]))
        for tied in names:
            lm.all_tied_weights_keys.pop(tied, None)


def _empty(config: ModelConfig, task: Task, numbers: Any, options: LoadOptions, quantizer: Quantizer | None) -> Any:
    """Build the model with parameters on meta; refuse a model that cannot be trained or quantized."""
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
    """Initialize a head from `seed` inside this context; other random numbers of the program are unaffected."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def quiet_transformers() -> None:
    """Turn off progress bars and warnings of transformers: loading is reported in one line, missing weights refused."""
    transformers.logging.disable_progress_bar()
    logging.getLogger("transformers.modeling_utils").addFilter(_is_no_warning)


def _is_no_warning(record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING


def read_weights(config: ModelConfig, task: Task, folder: Path, /, **options: Any) -> Any:
    """Return the model of a local folder; refuse missing weights, which transformers would initialize.

    Only a head for the labels of a run is initialized, if the folder has none of its size: see `drawing_by`.
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
        lm, report = kind.from_pretrained(
            str(folder),
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    odd = {*report["missing_keys"], *(mismatch[0] for mismatch in report.get("mismatched_keys", ()))}
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
