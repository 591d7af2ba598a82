"""Saved models as files that other tools load: an adapter, or base and adapter merged weight by weight."""

import copy
import json
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.adapters.adapter_methods import save_as_update
from app.adapters.merged_weights import fully_trained_weights
from app.base.base_model import BaseModel, open_base
from app.base.conversion import READABLE, ConvertedWeights, FolderReader
from app.base.packed_weights import PackedTensor, with_plain_weights
from app.base.text_part import rename_adapter
from app.base.tokenizer import NEW_TOKENS
from app.base.weight_files import (
    Names,
    StoredTensor,
    is_resized,
    size_of,
    stored_tensors,
    widest_first,
    without_backbone,
    write_weights,
)
from app.config.schema import ModelConfig
from app.config.tasks import task_of
from app.errors import CheckpointError, ConfigError
from app.layers.experts import adapted_weight, rounded_stack, stacks_of
from app.layers.quantization import Quantizer, is_conv1d
from app.model.build import DTYPES, ModelSections
from app.model.training_model import TrainingModel

MAX_FILE_BYTES = 50 * 10**9  # the shard size of transformers
_EQUAL_NAMES = Names()  # for a model that is not a text part
_TOKENIZER_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_TOKENIZER_FILES = ("*token*", "*.model", "vocab.*", "merges.txt", _TEMPLATE)


def save_model(
    training_model: TrainingModel,
    tokenizer: Any,
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
    names: Names = _EQUAL_NAMES,
    start: Mapping[str, Tensor] | None = None,
) -> None:
    """Save an adapter in PEFT format, or a whole model in transformers format, with its tokenizer. `tensors`: for a
    sharded model, those of `saved_tensors`, gathered one at a time. An adapter of a text part gets the names of the
    whole model, as other programs load it. `start`: initial A and B, which were subtracted from the base.
    """
    network: Any = training_model.network
    lm: Any = training_model.language_model
    if (
        training_model.has_classes and lm.config.pad_token_id is None
    ):  # without it transformers answers one text at a time
        lm.config.pad_token_id = tokenizer.pad_token_id
    if training_model.network is not training_model.language_model:
        options: dict[str, Any] = {} if tensors is None else {"state_dict": dict(tensors)}
        # "auto" would request the vocabulary of the base from the Hub
        network.save_pretrained(str(folder), save_embedding_layers=False, **options)
        if start:
            save_as_update(folder, start)
        if names.is_part:
            rename_adapter(folder, folder, names.of_folder)
        if training_model.has_classes:  # the only place with names and number of classes
            numbers = copy.deepcopy(lm.config)
            numbers.architectures = [type(lm).__name__]
            numbers.save_pretrained(str(folder))
    elif tensors is None:
        lm.save_pretrained(str(folder))
    elif _has_other_names_in_files(lm):
        lm.save_pretrained(str(folder), state_dict=dict(tensors))
    else:
        _save_one_by_one(lm, folder, saved_tensors(training_model), tensors)
    if (folder / "config.json").is_file():
        add_transformers_4_keys(folder, type(lm.config))
    save_tokenizer(tokenizer, folder)


def saved_tensors(training_model: TrainingModel) -> dict[str, Tensor]:
    """Return the tensors that `save_model` saves, as stored on this process, tied ones once."""
    network: Any = training_model.network
    lm: Any = training_model.language_model
    if network is not lm:
        return dict(adapter_tensors(training_model).values())
    state: dict[str, Tensor] = lm.state_dict(keep_vars=True)
    tied = {name for name, source in lm.all_tied_weights_keys.items() if state.get(name) is state.get(source)}
    return widest_first({name: tensor.detach() for name, tensor in state.items() if name not in tied})


def adapter_tensors(training_model: TrainingModel) -> dict[str, tuple[str, Tensor]]:
    """Return the tensors of an adapter file by their names there, with their names in the network."""
    from peft import get_peft_model_state_dict

    network: Any = training_model.network
    saved_keys = network.state_dict(keep_vars=True).keys()
    buffers = {name: buffer for name, buffer in network.named_buffers(remove_duplicate=False) if name in saved_keys}
    tensors = {**dict(network.named_parameters(remove_duplicate=False)), **buffers, **training_model.trained()}
    apart = {name: tensor.detach() for name, tensor in tensors.items()}  # one object per name: PEFT renames them
    saved = get_peft_model_state_dict(network, apart, save_embedding_layers=False)
    names = {id(tensor): name for name, tensor in saved.items()}
    return {names[id(tensor)]: (name, tensors[name]) for name, tensor in apart.items() if id(tensor) in names}


def _has_other_names_in_files(lm: Any) -> bool:
    """Return whether transformers renames, splits or joins tensors when saving, all at once."""
    from transformers.core_model_loading import revert_weight_conversion

    names = {name: torch.empty_like(tensor, device="meta") for name, tensor in lm.state_dict().items()}
    written = revert_weight_conversion(lm, dict(names))
    return bool(lm.is_remote_code()) or written.keys() != names.keys()


def _save_one_by_one(lm: Any, folder: Path, named: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Save like save_pretrained, with one tensor in memory at a time. `tensors` have the order of `named`."""
    write_config(lm, lm.dtype, folder)
    if lm.can_generate():
        lm.generation_config.save_pretrained(folder)
    write_weights(folder, named, tensors, MAX_FILE_BYTES)


def write_config(lm: Any, dtype: torch.dtype, folder: Path) -> None:
    """Write the config.json of a model alone."""
    numbers = copy.deepcopy(lm.config)
    numbers.architectures, numbers.dtype = [type(lm).__name__], str(dtype).removeprefix("torch.")
    vars(numbers).pop("quantization_config", None)
    numbers.save_pretrained(folder)


def save_base(training_model: TrainingModel, tokenizer: Any, folder: Path, drawn: Any = None) -> None:
    """Save a base of random weights without an adapter, because nothing else could restore it.

    For a quantized or sharded base the weights are `drawn` again: any tool reads them, and quantizing them again gives
    the same bytes.
    """
    lm: Any = training_model.language_model
    if drawn is None:
        adapter = {id(tensor) for tensor in saved_tensors(training_model).values()}
        base = {
            name.replace(".base_layer.", ".").replace(".original_module.", "."): tensor.detach()
            for name, tensor in lm.state_dict(keep_vars=True).items()
            if id(tensor) not in adapter
        }
        lm.save_pretrained(str(folder), state_dict=base)
    else:
        drawn.save_pretrained(str(folder))
    add_transformers_4_keys(folder, type(lm.config))
    save_tokenizer(tokenizer, folder)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Copy the source files of the tokenizer; write only the changes of the run, such as its chat template.

    transformers 5 would write `"tokenizer_class": "TokenizersBackend"`, which transformers 4 rejects.
    """
    source = Path(tokenizer.name_or_path)
    files = {file for pattern in _TOKENIZER_FILES for file in source.glob(pattern) if file.is_file()}
    for file in files:
        shutil.copyfile(file, folder / file.name)
    if not files:  # the source was deleted during the run
        tokenizer.save_pretrained(str(folder))
    config = json.loads((folder / _TOKENIZER_CONFIG).read_text()) if (folder / _TOKENIZER_CONFIG).is_file() else {}
    changes: dict[str, Any] = {}
    if "tokenizer_class" not in config and not (folder / "config.json").is_file():  # no other file has the class
        name = type(tokenizer).__name__
        changes["tokenizer_class"] = "PreTrainedTokenizerFast" if name == "TokenizersBackend" else name
    stored = config.get("chat_template")
    if (folder / _TEMPLATE).is_file():
        stored = (folder / _TEMPLATE).read_text()
    elif isinstance(stored, list):
        stored = {template["name"]: template["template"] for template in stored}
    if getattr(tokenizer, NEW_TOKENS, None):
        file = folder / "tokenizer.json"  # unchanged except for added tokens
        content, added = json.loads(file.read_text()), json.loads(tokenizer.backend_tokenizer.to_str())["added_tokens"]
        file.write_text(json.dumps({**content, "added_tokens": added}, ensure_ascii=False))
    if tokenizer.chat_template != stored:
        (folder / _TEMPLATE).write_text(tokenizer.chat_template)
        changes["chat_template"] = tokenizer.chat_template  # for tools that do not read the file
    if changes:
        (folder / _TOKENIZER_CONFIG).write_text(json.dumps(config | changes, indent=2, ensure_ascii=False) + "\n")


def add_transformers_4_keys(folder: Path, config_class: Any) -> None:
    """Add the keys that transformers 4 reads instead of `rope_parameters` to config.json; it would use defaults.

    The file does not change if transformers 5 would read another rope from it.
    """
    file = folder / "config.json"
    plain = file.read_text()
    config = json.loads(plain)
    added = transformers_4_keys(config)
    if added:
        before = _rope_in(folder, config_class)
        file.write_text(json.dumps(config | added, indent=2, sort_keys=True) + "\n")
        if _rope_in(folder, config_class) != before:
            file.write_text(plain)


def _rope_in(folder: Path, config_class: Any) -> dict[str, Any]:
    """Return the rope that transformers 5 reads, without `type`, an older name of `rope_type`."""
    rope = config_class.from_pretrained(str(folder)).rope_parameters
    return {key: value for key, value in rope.items() if key != "type"}


def transformers_4_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_theta`, `rope_scaling` and similar keys for a transformers 5 config.json with a flat rope.

    transformers 5 reads `rope_scaling` instead of `rope_parameters`, so both must mean the same.
    """
    rope = config.get("rope_parameters")
    if not rope or any(isinstance(value, dict) for value in rope.values()):
        return {}
    scaling = {key: value for key, value in rope.items() if key not in {"rope_theta", "partial_rotary_factor"}}
    if scaling["rope_type"] == "longrope" and "original_max_position_embeddings" in config:  # Phi 3 allows three keys
        scaling = {"type": "longrope", **{key: scaling[key] for key in ("short_factor", "long_factor")}}
    keys = {"rope_theta": rope["rope_theta"], "rope_scaling": scaling if scaling != {"rope_type": "default"} else None}
    if "partial_rotary_factor" in rope:
        keys["partial_rotary_factor"] = rope["partial_rotary_factor"]
    kind = config.get("model_type")  # these also have other names
    if kind == "gpt_neox":
        keys |= {"rotary_emb_base": rope["rope_theta"], "rotary_pct": keys.pop("partial_rotary_factor")}
    elif kind == "qwen3_moe":
        keys["num_experts"] = config["num_local_experts"]
    return keys


def needs_transformers_5(folder: Path) -> bool:
    """Return whether layers have different ropes, for which transformers 4 has other keys in each model type."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    config = config.get("text_config") or config
    return bool(config.get("rope_parameters")) and "rope_theta" not in config


# ---- merge


EXPORTED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Merge:
    """A merge of a folder's weights. Names of `tensors` are those in files, all others those in the trained model."""

    tensors: Mapping[str, StoredTensor]
    names: Names
    updates: Mapping[str, Callable[[Tensor], Tensor]]  # from the adapter
    quantized: frozenset[str]  # during training
    unchanged: frozenset[str]  # names in files of weights that were trained on as they are packed there
    transposed: frozenset[str]  # stored [in, out]
    quantizer: Quantizer | None
    base_dtype: torch.dtype  # in training, of unquantized weights
    out: torch.dtype
    converted: ConvertedWeights
    as_stored: re.Pattern[str] | None  # weights that transformers always keeps in fp32, and those outside a text part
    device: torch.device
    text_alone: bool  # writes the text part of a multimodal model as a separate model

    @property
    def bytes(self) -> int:
        """Size of all written weights."""
        return sum(map(size_of, self.written.values()))

    def write(self, folder: Path, shard_bytes: float) -> int:
        """Write safetensors files of at most `shard_bytes`, or one weight; return the number of rounded matrices."""
        written, rounded = self.written, 0

        def merged() -> Iterator[tuple[str, Tensor]]:
            nonlocal rounded
            for name in written:
                tensor, was_rounded = self.weight(name)
                rounded += was_rounded and tensor.ndim > 1
                yield name, tensor

        named = {self._written_name(name): place for name, place in written.items()}
        write_weights(folder, named, ((self._written_name(name), tensor) for name, tensor in merged()), shard_bytes)
        return rounded

    def _written_name(self, file: str) -> str:
        return str(self.names.of_file(file)) if self.text_alone else file

    def weight(self, name: str) -> tuple[Tensor, bool]:
        """Return the written weight with this name in the files, and whether it was rounded."""
        if name in self.converted.names:
            exact = self.converted.take(
                name,
                lambda source, tensor: self._trained(
                    self.names.of_trained(source), tensor.to(self.device, self.base_dtype)
                ),
            )
        else:
            place = self.tensors[name]
            stored = place.read()
            if self._stays(name):
                return stored, False
            # an adapter's head is in fp32
            dtype = torch.float32 if place.name != name or name in self.unchanged else self.base_dtype
            exact = self._trained(self.names.of_file(name), stored.to(self.device, dtype))
        result = exact.to(self.out)
        if not bool(result.isfinite().all()):
            cause = "is not finite" if not bool(exact.isfinite().all()) else f"does not fit into {self.out}"
            raise CheckpointError(
                f"kind=merged: {name} has a value that {cause}. Set dtype=bf16 or fp32, which cover the training range."
            )
        return result.to("cpu").contiguous(), not torch.equal(result.to(exact.dtype), exact)

    def _trained(self, name: str | None, weight: Tensor) -> Tensor:
        """Return the weight of a layer after training, including the adapter; other weights are returned unchanged.

        A quantized weight is dequantized in fp32, before rounding to the compute dtype of its layer, so the bytes do
        not depend on the dtype that it was quantized from.
        """
        if name is None:
            return weight
        transposed = name in self.transposed
        if weight.ndim == 3:
            return self._trained_stack(name, weight, transposed=transposed)
        weight = weight.T.contiguous() if transposed else weight
        if name in self.quantized:
            assert self.quantizer is not None
            weight = self.quantizer.rounded(weight.float())
        if name in self.updates:
            weight = self.updates[name](weight)
        return weight.T.contiguous() if transposed else weight

    def _trained_stack(self, name: str, stack: Tensor, *, transposed: bool) -> Tensor:
        """Return a stack of experts after training; it is quantized as stored."""
        if name in self.quantized:
            assert self.quantizer is not None
            stack = rounded_stack(self.quantizer, stack.float(), is_transposed=transposed)
        if name in self.updates:
            stack = self.updates[name](stack.mT if transposed else stack)
            stack = stack.mT if transposed else stack
        return stack

    def _stays(self, name: str) -> bool:
        """Return whether a weight is written as stored: fp32 in transformers, integers and fp8."""
        dtype = self.tensors[name].dtype
        is_listed = self.as_stored is not None and self.as_stored.search(name) is not None
        return is_listed or not dtype.is_floating_point or dtype.itemsize == 1

    @cached_property
    def written(self) -> dict[str, StoredTensor]:
        """The written tensors, with order and dtypes."""
        return widest_first(
            {
                name: place if self._stays(name) else replace(place, dtype=self.out)
                for name, place in self.tensors.items()
                if not self.text_alone or self.names.of_file(name) is not None
            }
        )


def plan_merge(
    sections: ModelSections,
    updates: Mapping[str, Callable[[Tensor], Tensor]],
    dtype: str,
    device: torch.device,
    final: Path | None = None,
    *,
    text_alone: bool = False,
) -> Merge:
    """Find all quantized or adapted weights in the files of `sections.model.path`, or refuse.

    `final`: folder of the adapter, for fully trained modules. `text_alone`: leave out other towers.
    """
    task, folder = task_of(sections.task), _mergeable(Path(sections.model.path))
    base = open_base(sections.model, sections.task)
    lm, tensors = base.on_meta(), with_plain_weights(stored_tensors(folder), base.unpacked_format)
    if text_alone:
        _require_text_model(base)
    changes = {adapted_weight(lm, _trained_name(base.names, layer)): update for layer, update in updates.items()}
    quantized = frozenset(_packed_weights(lm, sections.quantizer))
    changed = quantized | changes.keys()
    reader = FolderReader(base.folder_model, tensors, base.unpacked_format)
    in_folder = {base.names.of_folder(name) for name in (*changed, *(lm.state_dict() if text_alone else ()))}
    converted = ConvertedWeights.of(base.folder_model, reader, in_folder, unpacked=base.unpacked_format is not None)
    names = base.names.with_files(reader.stored_names(), converted.names)
    tensors = converted.in_place(_resized(sections.model, lm, names.files, tensors), EXPORTED[dtype])
    of_towers = tensors.keys() - names.files.values() - converted.names.keys() if names.is_part else ()
    if final is not None:
        tensors = _with_whole(lm, tensors, names, fully_trained_weights(final), pooled=task.has_classes)
    _require_stored(lm, changed, tensors, names, converted.parameters, sections.model.path)
    base_dtype = DTYPES[sections.precision].base if sections.adapter.kind != "none" else torch.float32
    kind = None if sections.quantizer is None else sections.quantizer.kind
    unchanged = {name for name, place in tensors.items() if isinstance(place, PackedTensor) and place.numbers == kind}
    return Merge(
        tensors=tensors,
        names=names,
        updates=changes,
        quantized=quantized.difference(map(names.of_file, unchanged)),
        unchanged=frozenset(unchanged),
        transposed=frozenset(name for name in changed if _is_transposed(lm, name)),
        quantizer=sections.quantizer,
        base_dtype=base_dtype,
        out=EXPORTED[dtype],
        as_stored=_as_stored(lm, base_dtype, of_towers),
        device=device,
        converted=converted,
        text_alone=text_alone,
    )


def _trained_name(names: Names, name: str) -> str:
    """Return the name in the trained model for a layer in an adapter file."""
    return names.of_trained(name) or name


def _resized(
    config: ModelConfig, lm: Any, stored: Mapping[str, str], tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return the tensors, some with the rows of a larger vocabulary; `stored`: their names by those of the model."""
    shapes = {stored[name]: tensor.shape for name, tensor in lm.state_dict().items() if name in stored}
    resized = {
        name: replace(place, shape=shapes[name])
        for name, place in tensors.items()
        if name in shapes and is_resized(config, place.shape, shapes[name])
    }
    return {**tensors, **resized}


def _packed_weights(lm: Any, quantizer: Quantizer | None) -> list[str]:
    """Return the names of quantized base weights."""
    if quantizer is None:
        return []
    stacks = stacks_of(lm) if quantizer.packs_experts else []
    return [*(f"{layer}.weight" for layer in quantizer.layers(lm)), *stacks]


def _require_text_model(base: BaseModel) -> None:
    """Refuse a text part that cannot be a separate model."""
    part = base.text_part
    if part is None or type(part.whole) is type(base.on_meta()):
        reason = "the model is text-only" if part is None else "transformers has no class for its text part"
        raise ConfigError(f"names=text: {reason}. Leave names out.")


def _as_stored(lm: Any, base_dtype: torch.dtype, outside: Collection[str]) -> re.Pattern[str] | None:
    """Return a pattern for names that transformers keeps in fp32, and for tensors `outside` a text part."""
    fp32 = set(getattr(lm, "_keep_in_fp32_modules_strict", None) or ())
    if base_dtype == torch.float16:
        fp32 |= set(getattr(lm, "_keep_in_fp32_modules", None) or ())
    as_stored = [rf"(?:^|\.){re.escape(name)}(?:\.|$)" for name in sorted(fp32)]
    as_stored += [f"^{re.escape(name)}$" for name in sorted(outside)]
    return re.compile("|".join(as_stored)) if as_stored else None


def _mergeable(folder: Path) -> Path:
    """Refuse a folder with weights that remain quantized."""
    quantization = json.loads((folder / "config.json").read_text()).get("quantization_config")
    if quantization and quantization.get("quant_method") not in READABLE:
        raise ConfigError(
            f"kind=merged: the weights in {folder} are already quantized, and merging into them is not supported. "
            "Set kind=adapter."
        )
    return folder


def _is_transposed(lm: Any, name: str) -> bool:
    """Return whether a weight is stored [in, out], or a stack [experts, in, out]."""
    module = lm.get_submodule(name.rpartition(".")[0])
    return bool(getattr(module, "is_transposed", False)) or is_conv1d(module)


def _with_whole(
    lm: Any, tensors: Mapping[str, StoredTensor], names: Names, whole: Mapping[str, StoredTensor], *, pooled: bool
) -> dict[str, StoredTensor]:
    """Replace tensors of the base by those of fully trained modules; tied tensors are in the files once."""
    trained = {_trained_name(names, name): place for name, place in whole.items()}
    if not (pooled and trained):
        in_files = {names.files[name]: place for name, place in trained.items() if name in names.files}
        return {**tensors, **in_files}
    inside = f"{lm.base_model_prefix}."
    has_prefix = any(name.startswith(inside) for name in tensors)
    state = lm.state_dict()
    result = {n: t for n, t in tensors.items() if n.startswith(inside) or not has_prefix or n in state}
    for name, place in trained.items():
        short = without_backbone(name, lm.base_model_prefix)
        result[short if short in result else name] = place
    return result


def merged_config(folder: Path, dtype: str) -> dict[str, Any]:
    """Return the config.json of a folder with the dtype of the merged weights."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    for part in (config, *(inner for inner in config.values() if isinstance(inner, dict))):
        part.pop("quantization_config", None)
        if part is config or "dtype" in part or "torch_dtype" in part:
            part.pop("torch_dtype", None)
            part["dtype"] = str(EXPORTED[dtype]).removeprefix("torch.")
    config.pop("_name_or_path", None)
    return config


def with_rope(config: Mapping[str, Any], rope: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a config.json with the values of `BaseModel.rope`, also for transformers 4, in its text part if any."""
    if rope is None:
        return dict(config)
    text = config.get("text_config") or config
    scaled = {name: value for name, value in text.items() if name not in {"rope_scaling", "rope_theta"}} | dict(rope)
    scaled |= transformers_4_keys(scaled)
    return scaled if text is config else {**config, "text_config": scaled}


def _require_stored(
    lm: Any,
    changed: Collection[str],
    tensors: Mapping[str, StoredTensor],
    names: Names,
    converted: Collection[str],
    path: str,
) -> None:
    """Refuse a folder without the `changed` weights, or with other shapes."""
    shapes = {name: tensor.shape for name, tensor in lm.state_dict().items()}
    missing = [
        name.removesuffix(".weight")
        for name in sorted(changed)
        if not ((file := names.files.get(name, "")) in tensors and tensors[file].shape == shapes[name])
        and names.of_folder(name) not in converted
    ]
    if missing:
        raise CheckpointError(
            f"kind=merged: the files of model.path={path} have no weight with the right name and shape for "
            f"{len(missing)} layers of the model ({', '.join(missing[:3])}{', ...' if missing[3:] else ''}). Set "
            "kind=adapter."
        )
