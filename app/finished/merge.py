"""Base and adapter as one model, weight by weight: no more than one weight is ever in memory."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.adapters.merged_weights import fully_trained_weights
from app.base.conversion import UNPACKED, FolderReader
from app.base.converted_weights import ConvertedWeights
from app.base.names import Names, without_backbone
from app.base.safetensors_files import StoredTensor, is_resized, size_of, stored_tensors, widest_first, write_weights
from app.base.structure import BaseModel, open_base
from app.config.schema import ModelConfig
from app.config.tasks import task_of
from app.errors import CheckpointError, ConfigError
from app.layers.experts import adapted_weight, stacks_of
from app.layers.quantization import Quantizer, backbone_linear_layers, is_conv1d
from app.model.build import DTYPES, ModelSections

EXPORTED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Merge:
    """A merge of a folder's weights. `tensors` have the names in its files, all others those in the trained model."""

    tensors: Mapping[str, StoredTensor]
    names: Names
    updates: Mapping[str, Callable[[Tensor], Tensor]]  # by the adapter
    quantized: frozenset[str]  # during training
    transposed: frozenset[str]  # stored [in, out]
    quantizer: Quantizer | None
    base_dtype: torch.dtype  # in training, of what was not quantised
    out: torch.dtype
    converted: ConvertedWeights
    as_stored: re.Pattern[str] | None  # what transformers keeps in fp32 in any case, and what is beside a text part
    device: torch.device
    text_alone: bool  # writes the text part of a composite, as a model of its own

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

        named = {self._written_name(name): each for name, each in written.items()}
        write_weights(folder, named, ((self._written_name(name), each) for name, each in merged()), shard_bytes)
        return rounded

    def _written_name(self, file: str) -> str:
        return str(self.names.of_file(file)) if self.text_alone else file

    def weight(self, name: str) -> tuple[Tensor, bool]:
        """Return the weight with this name in the files as it is written, and whether it was rounded."""
        if name in self.converted.names:
            exact = self.converted.take(
                name,
                lambda made, tensor: self._trained(
                    self.names.of_trained(made), tensor.to(self.device, self.base_dtype)
                ),
            )
        else:
            place = self.tensors[name]
            stored = place.read()
            if self._stays(name):
                return stored, False
            dtype = self.base_dtype if place.name == name else torch.float32  # an adapter's head is in fp32
            exact = self._trained(self.names.of_file(name), stored.to(self.device, dtype))
        result = exact.to(self.out)
        if not bool(result.isfinite().all()):
            cause = "is not finite" if not bool(exact.isfinite().all()) else f"does not fit into {self.out}"
            raise CheckpointError(
                f"kind=merged: {name} has a value that {cause}. dtype=bf16 and fp32 reach as far as training did."
            )
        return result.to("cpu").contiguous(), not torch.equal(result.to(exact.dtype), exact)

    def _trained(self, name: str | None, weight: Tensor) -> Tensor:
        """Return the weight of a layer after training, adapter included; other weights are returned unchanged.

        A quantized weight is dequantized in fp32, before a layer rounds it to its compute dtype: the bytes do not
        depend on the dtype that it was quantized from.
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
                if not self.text_alone or self.names.of_file(n) is not None
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
    base = open_base(sections.model, sections.task)
    lm, tensors = base.on_meta(), stored_tensors(folder)
    if text_alone:
        _require_text_model(base)
    changes = {adapted_weight(lm, _trained_name(base.names, layer)): update for layer, update in updates.items()}
    quantized = frozenset(_packed_weights(lm, sections.quantizer))
    changed = quantized | changes.keys()
    reader = FolderReader(base.folder_model, tensors, base.unpacked_format)
    wanted = {base.names.of_folder(name) for name in (*changed, *(lm.state_dict() if text_alone else ()))}
    converted = ConvertedWeights.of(base.folder_model, reader, wanted, unpacked=base.unpacked_format is not None)
    names = base.names.with_files(reader.stored_names(), converted.names)
    tensors = converted.in_place(_resized(sections.model, lm, names.files, tensors), EXPORTED[dtype])
    of_towers = tensors.keys() - names.files.values() - converted.names.keys() if names.is_part else ()
    if final is not None:
        tensors = _with_whole(lm, tensors, names, fully_trained_weights(final), pooled=task.has_classes)
    _require_stored(lm, changed, tensors, names, converted.parameters, sections.model.path)
    base_dtype = DTYPES[sections.precision].base if sections.adapter.kind != "none" else torch.float32
    return Merge(
        tensors=tensors,
        names=names,
        updates=changes,
        quantized=quantized,
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
    """Return the name in the trained model of a layer in an adapter file."""
    return names.of_trained(name) or name


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


def _require_text_model(base: BaseModel) -> None:
    """Refuse a text part that cannot be a model of its own."""
    part = base.text_part
    if part is None or type(part.whole) is type(base.on_meta()):
        reason = "the model is one of text" if part is None else "transformers has no class for its text part"
        raise ConfigError(f"names=text: {reason}. Leave names out.")


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
    lm: Any, tensors: Mapping[str, StoredTensor], names: Names, whole: Mapping[str, StoredTensor], *, pooled: bool
) -> dict[str, StoredTensor]:
    """Replace tensors of the base by those of modules that were trained in full; tied tensors are in the files once."""
    trained = {_trained_name(names, name): each for name, each in whole.items()}
    if not (pooled and trained):
        in_files = {names.files[name]: each for name, each in trained.items() if name in names.files}
        return {**tensors, **in_files}
    inside = f"{lm.base_model_prefix}."
    has_prefix = any(name.startswith(inside) for name in tensors)
    known = lm.state_dict()
    kept = {n: t for n, t in tensors.items() if n.startswith(inside) or not has_prefix or n in known}
    for name, each in trained.items():
        short = without_backbone(name, lm.base_model_prefix)
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


def _require_stored(
    lm: Any,
    changed: Collection[str],
    tensors: Mapping[str, StoredTensor],
    names: Names,
    converted: Collection[str],
    path: str,
) -> None:
    """Refuse a folder that lacks `changed` weights, or has them in other shapes."""
    shapes = {name: each.shape for name, each in lm.state_dict().items()}
    missing = [
        name.removesuffix(".weight")
        for name in sorted(changed)
        if not ((file := names.files.get(name, "")) in tensors and tensors[file].shape == shapes[name])
        and names.of_folder(name) not in converted
    ]
    if missing:
        raise CheckpointError(
            f"kind=merged: the files of model.path={path} have no weight for {len(missing)} layers of the model "
            f"({', '.join(missing[:3])}{', ...' if missing[3:] else ''}) under their names or in their shapes. Give "
            "kind=adapter."
        )
