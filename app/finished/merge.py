"""Base and adapter as one model, weight by weight: no more than one weight is ever in memory."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.adapters.merged_weights import fully_trained_weights
from app.base.conversion import UNPACKED, FolderReader
from app.base.converted_weights import ConvertedWeights
from app.base.safetensors_files import StoredTensor, is_resized, size_of, stored_tensors, widest_first, write_weights
from app.base.structure import BaseModel
from app.base.text_part import TextPart
from app.config.schema import ModelConfig
from app.config.tasks import task_of
from app.errors import CheckpointError, ConfigError
from app.layers.experts import adapted_weight, stacks_of
from app.layers.quantization import Quantizer, backbone_linear_layers, is_conv1d
from app.model.build import DTYPES, ModelSections

EXPORTED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Merge:
    """A merge of a folder's weights. Names in `updates`, `quantized` and `transposed` are those in its files."""

    tensors: Mapping[str, StoredTensor]
    names: Mapping[str, str]  # in the files, by those of the parameters that are trained, or could be
    updates: Mapping[str, Callable[[Tensor], Tensor]]  # by the adapter
    quantized: frozenset[str]  # during training
    transposed: frozenset[str]  # stored [in, out]
    quantizer: Quantizer | None
    base_dtype: torch.dtype  # in training, of what was not quantised
    out: torch.dtype
    converted: ConvertedWeights  # in `updates`, `quantized` and `transposed` by the names of their parameters
    as_stored: re.Pattern[str] | None  # what transformers keeps in fp32 in any case, and what is beside a text part
    device: torch.device
    written_as: Mapping[str, str] | None = None  # of a text part alone: names of its model, by those in the files

    @property
    def bytes(self) -> int:
        """Size of all weights as they will be written."""
        return sum(map(size_of, self._written().values()))

    def write(self, folder: Path, shard_bytes: float) -> int:
        """Write safetensors files of at most `shard_bytes`, or of one weight; returns how many matrices it rounded."""
        written, rounded = self._written(), 0

        def merged() -> Iterator[tuple[str, Tensor]]:
            nonlocal rounded
            for name in written:
                tensor, was_rounded = self.weight(name)
                rounded += was_rounded and tensor.ndim > 1
                yield name, tensor

        renamed = self.written_as or {name: name for name in written}
        named = {renamed[name]: each for name, each in written.items()}
        write_weights(folder, named, ((renamed[name], each) for name, each in merged()), shard_bytes)
        return rounded

    def weight(self, name: str) -> tuple[Tensor, bool]:
        """The weight as it is written, and whether it was rounded."""
        if name in self.converted.names:
            exact = self.converted.take(
                name, lambda each, made: self._trained(each, made.to(self.device, self.base_dtype))
            )
        else:
            place = self.tensors[name]
            stored = place.read()
            if self._stays(name):
                return stored, False
            dtype = self.base_dtype if place.name == name else torch.float32  # an adapter's head is in fp32
            exact = self._trained(name, stored.to(self.device, dtype))
        result = exact.to(self.out)
        if not bool(result.isfinite().all()):
            cause = "is not finite" if not bool(exact.isfinite().all()) else f"does not fit into {self.out}"
            raise CheckpointError(
                f"kind=merged: {name} has a value that {cause}. dtype=bf16 and fp32 reach as far as training did."
            )
        return result.to("cpu").contiguous(), not torch.equal(result.to(exact.dtype), exact)

    def _trained(self, name: str, weight: Tensor) -> Tensor:
        """The layer's weight at the end of training, adapter included. A quantised one is dequantised in fp32, before a
        layer rounds it to the dtype of its arithmetic: the bytes do not depend on the dtype they were made from.
        """
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
        """Of experts; packed as it is stored."""
        if name in self.quantized:
            assert self.quantizer is not None
            stack = self.quantizer.rounded(stack.float().flatten(0, 1)).view_as(stack)
        if name in self.updates:
            stack = self.updates[name](stack.mT if transposed else stack)
            stack = stack.mT if transposed else stack
        return stack

    def _stays(self, name: str) -> bool:
        """Whether it is written as it is stored: what transformers keeps in fp32, integers, and fp8."""
        dtype = self.tensors[name].dtype
        kept = self.as_stored is not None and self.as_stored.search(name) is not None
        return kept or not dtype.is_floating_point or dtype.itemsize == 1

    def _written(self) -> dict[str, StoredTensor]:
        """The tensors in the order and the dtypes in which they are written."""
        return widest_first(
            {
                n: each if self._stays(n) else replace(each, dtype=self.out)
                for n, each in self.tensors.items()
                if self.written_as is None or n in self.written_as
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
    """Find every weight that was quantised or has an adapter in the files of `sections.model.path`, or refuse.

    `final`: folder of the adapter, for modules that were trained as a whole. `text_alone`: leave out other towers.
    """
    task, folder = task_of(sections.task), _mergeable(Path(sections.model.path))
    base = BaseModel(sections.model, task)
    lm, part, tensors, quantizer = base.on_meta(), base.text_part, stored_tensors(folder), sections.quantizer
    base_dtype = DTYPES[sections.precision].base if sections.adapter.kind != "none" else torch.float32
    # by the names of the text model, where the adapter has those of the whole
    own_name = partial(_name_in_text, part)
    trained_whole = {} if final is None else {own_name(n): each for n, each in fully_trained_weights(final).items()}
    changes = {adapted_weight(lm, own_name(layer)): update for layer, update in updates.items()}
    quantized = _packed_weights(lm, quantizer)
    # names in the model of the folder, by those in the text model
    in_folder = {name: name if part is None else part.in_whole(name) or name for name in {*quantized, *changes}}
    whole = lm if part is None else part.whole
    reader = FolderReader(whole, tensors, base.unpacked_format)
    wanted = {*in_folder.values(), *(_all_in_whole(base) if text_alone else ())}
    converted = ConvertedWeights.of(whole, reader, wanted, unpacked=base.unpacked_format is not None)
    stored = {name: file for name, file in reader.stored_names().items() if file in tensors}
    of_text = stored if part is None else {part.in_text(name) or "": file for name, file in stored.items()}
    tensors = converted.in_place(_resized(sections.model, lm, stored, tensors), EXPORTED[dtype])
    of_towers = set() if part is None else tensors.keys() - {of_text[n] for n in of_text if n} - converted.names.keys()
    tensors = _with_whole(lm, tensors, of_text, trained_whole, pooled=task.has_classes)
    names = _names_in_files(lm, in_folder, tensors, stored, converted.parameters, sections.model.path)
    of_text |= {name if part is None else part.in_text(name) or "": name for name in converted.names}
    by_name = {name: there for name, there in of_text.items() if name and there in tensors}
    return Merge(
        tensors=tensors,
        names=by_name,
        updates={names[name]: update for name, update in changes.items()},
        quantized=frozenset(names[name] for name in quantized),
        transposed=frozenset(there for name, there in names.items() if _is_transposed(lm, name)),
        quantizer=quantizer,
        base_dtype=base_dtype,
        out=EXPORTED[dtype],
        as_stored=_as_stored(lm, base_dtype, of_towers),
        device=device,
        converted=converted,
        written_as={there: name for name, there in by_name.items()} if text_alone else None,
    )


def _name_in_text(part: TextPart | None, name: str) -> str:
    return name if part is None else part.in_text(name) or name


def _resized(
    config: ModelConfig, lm: Any, stored: Mapping[str, str], tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The tensors, some with the rows of a larger vocabulary; `stored`: their names by those of the model."""
    wanted = {stored[name]: each.shape for name, each in lm.state_dict().items() if name in stored}
    resized = {
        name: replace(each, shape=wanted[name])
        for name, each in tensors.items()
        if name in wanted and is_resized(config, each.shape, wanted[name])
    }
    return {**tensors, **resized}


def _packed_weights(lm: Any, quantizer: Quantizer | None) -> list[str]:
    """Names of the weights that a quantised base has packed."""
    if quantizer is None:
        return []
    stacks = stacks_of(lm) if quantizer.packs_experts else []
    return [*(f"{layer}.weight" for layer in backbone_linear_layers(lm)), *stacks]


def _all_in_whole(base: BaseModel) -> list[str]:
    """Names in the whole of all weights of its text part, which is to be a model of its own."""
    lm, part = base.on_meta(), base.text_part
    if part is None or type(part.whole) is type(lm):
        reason = "the model is one of text" if part is None else "transformers has no class for its text part"
        raise ConfigError(f"names=text: {reason}. Leave names out.")
    return [part.in_whole(name) or name for name in lm.state_dict()]


def _as_stored(lm: Any, base_dtype: torch.dtype, beside: Collection[str]) -> re.Pattern[str] | None:
    """Names of what transformers keeps in fp32, and the tensors `beside` a text part."""
    kept = set(getattr(lm, "_keep_in_fp32_modules_strict", None) or ())
    if base_dtype == torch.float16:
        kept |= set(getattr(lm, "_keep_in_fp32_modules", None) or ())
    as_stored = [rf"(?:^|\.){re.escape(name)}(?:\.|$)" for name in sorted(kept)]
    as_stored += [f"^{re.escape(name)}$" for name in sorted(beside)]
    return re.compile("|".join(as_stored)) if as_stored else None


def _mergeable(folder: Path) -> Path:
    """Refuse a folder in which weights are packed and stay so."""
    given = json.loads((folder / "config.json").read_text()).get("quantization_config")
    if given and given.get("quant_method") not in UNPACKED:
        raise ConfigError(
            f"kind=merged: the weights in {folder} are quantised already, and nothing is merged into such. "
            "Give kind=adapter."
        )
    return folder


def _is_transposed(lm: Any, name: str) -> bool:
    """Whether a weight is stored [in, out], or a stack [experts, in, out]."""
    module = lm.get_submodule(name.rpartition(".")[0])
    return bool(getattr(module, "is_transposed", False)) or is_conv1d(module)


def _with_whole(
    lm: Any,
    tensors: Mapping[str, StoredTensor],
    stored: Mapping[str, str],
    trained: Mapping[str, StoredTensor],
    *,
    pooled: bool,
) -> dict[str, StoredTensor]:
    """The tensors of the base with those in place that were trained whole; `stored`: their names by those of the model.

    A tied one stands in the files once.
    """
    if not (pooled and trained):
        return {**tensors, **{stored[name]: each for name, each in trained.items() if name in stored}}
    inside = f"{lm.base_model_prefix}."
    has_prefix = any(name.startswith(inside) for name in tensors)
    known = lm.state_dict()
    kept = {n: t for n, t in tensors.items() if n.startswith(inside) or not has_prefix or n in known}
    for name, each in trained.items():
        short = name.removeprefix(inside)
        kept[short if short in kept else name] = each
    return kept


def merged_config(folder: Path, dtype: str) -> dict[str, Any]:
    """The config.json of a folder, with the dtype of the merged weights."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    for part in (config, *(inner for inner in config.values() if isinstance(inner, dict))):
        part.pop("quantization_config", None)
        if part is config or "dtype" in part or "torch_dtype" in part:
            part.pop("torch_dtype", None)
            part["dtype"] = str(EXPORTED[dtype]).removeprefix("torch.")
    config.pop("_name_or_path", None)
    return config


def _names_in_files(
    lm: Any,
    wanted: Mapping[str, str],
    tensors: Mapping[str, StoredTensor],
    stored: Mapping[str, str],
    converted: Collection[str],
    path: str,
) -> dict[str, str]:
    """Names in the files, or in the folder's model where they are converted, of weights `wanted` by name."""
    found, missing, shapes = {}, [], {name: each.shape for name, each in lm.state_dict().items()}
    for name, there in wanted.items():
        file = stored.get(there, "")
        if file in tensors and tensors[file].shape == shapes[name]:
            found[name] = file
        elif there in converted:
            found[name] = there
        else:
            missing.append(name.removesuffix(".weight"))
    if missing:
        missing.sort()
        raise CheckpointError(
            f"kind=merged: the files of model.path={path} have no weight for {len(missing)} layers of the model "
            f"({', '.join(missing[:3])}{', ...' if missing[3:] else ''}) under their names or in their shapes. Give "
            "kind=adapter."
        )
    return found
