"""Base and adapter as one model, weight by weight: no more than one weight is ever in memory."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from app.config.adapters import ADAPTER_WEIGHTS
from app.config.tasks import task_of
from app.errors import CheckpointError, ConfigError
from app.model.adapters import PREFIX, quiet_peft, read_adapter_config
from app.model.build import DTYPES, ModelSections
from app.model.conversion import FolderReader
from app.model.quantization import Quantizer, backbone_linear_layers, is_conv1d
from app.model.safetensors_files import (
    StoredTensor,
    size_of,
    stored_tensors,
    tensors_of_file,
    widest_first,
    write_weights,
)
from app.model.structure import BaseModel

_ROWS = ".token_adapter.trainable_tokens_delta"  # ends the names of trained rows of an embedding or a head
EXPORTED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def read_updates(final: Path) -> dict[str, Callable[[Tensor], Tensor]]:
    """What makes of each adapted layer's weight [out, in] the one with its adapter, by full names of the layers.

    Refuses adapters with anything that cannot be merged so.
    """
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    config = read_adapter_config(final)
    mark = f".{PEFT_TYPE_TO_TUNER_MAPPING[config['peft_type']].prefix}"  # before the names of a method's own tensors
    parts: dict[str, dict[str, Tensor]] = {}
    updates: dict[str, Callable[[Tensor], Tensor]] = {}
    for full, tensor in load_file(str(final / ADAPTER_WEIGHTS)).items():
        name = full.removeprefix(PREFIX)
        layer, is_own, _ = name.partition(mark)
        if is_own:
            parts.setdefault(layer, {})[full] = tensor
        elif name.endswith(_ROWS):
            layer = name.removesuffix(_ROWS)
            updates[layer] = partial(_with_rows, rows=tensor, ids=_ids_of(layer, config))
        elif not _is_whole(name, config):
            raise CheckpointError(
                f"kind=merged: the adapter in {final} has the tensor {full}, which is not merged here yet. "
                "kind=adapter exports it as it is."
            )
    return updates | {
        layer: partial(_merged_by_peft, layer=layer, config=config, parts=own) for layer, own in parts.items()
    }


def _merged_by_peft(weight: Tensor, layer: str, config: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Tensor:
    """The weight [out, in] of a layer with its adapter, in fp32: PEFT merges a model of this layer alone."""
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING, get_peft_model, set_peft_model_state_dict

    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.to(torch.float32, copy=True), requires_grad=False)  # merged in place
    lm, module = nn.Module(), nn.Module()
    *path, last = layer.split(".")
    module = lm
    for part in path:
        module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.add_module(last, linear)
    own: dict[str, Any] = {
        "task_type": None,
        "modules_to_save": None,
        "trainable_token_indices": None,
        "ensure_weight_tying": False,
    }
    own |= {"fan_in_fan_out": False, "inference_mode": False, "base_model_name_or_path": None}
    for key in {"rank_pattern", "alpha_pattern"} & config.keys():  # PEFT warns of names of other layers
        own[key] = {name: each for name, each in config[key].items() if f".{layer}".endswith(f".{name}")}
    settings = PEFT_TYPE_TO_CONFIG_MAPPING[config["peft_type"]].from_peft_type(
        **{key: own.get(key, value) for key, value in config.items()}
    )
    with quiet_peft():
        network: Any = get_peft_model(lm, settings)
        found = set_peft_model_state_dict(network, dict(parts))
        assert not found.unexpected_keys, found.unexpected_keys
        result: Tensor = network.merge_and_unload().get_submodule(layer).weight.detach()
    return result


def _with_rows(weight: Tensor, rows: Tensor, ids: list[int]) -> Tensor:
    """A weight with other rows of some tokens."""
    return weight.float().index_copy(0, torch.tensor(ids, device=weight.device), rows.to(weight.device, torch.float32))


def _ids_of(layer: str, config: Mapping[str, Any]) -> list[int]:
    """The tokens of which a module has trained rows."""
    known: Mapping[str, list[int]] = config["trainable_token_indices"]
    return next(ids for name, ids in known.items() if layer.endswith(name))


def fully_trained_weights(final: Path) -> dict[str, StoredTensor]:
    """Weights that the adapter replaces as a whole, by their names in the model."""
    config = read_adapter_config(final)
    stored = tensors_of_file(final / ADAPTER_WEIGHTS)
    return {name.removeprefix(PREFIX): each for name, each in stored.items() if _is_whole(name, config)}


def _is_whole(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a weight belongs to a module that was trained as a whole, or to one that is tied to such a module."""
    whole, plain = config.get("modules_to_save") or (), f".{name.removeprefix(PREFIX)}"
    is_tied = config.get("ensure_weight_tying") and not any(mark in plain for mark in (".lora_", ".token_adapter."))
    return bool(is_tied) or any(f".{each}." in plain for each in whole)


@dataclass(frozen=True)
class Merge:
    """A merge of a folder's weights. Names in `updates`, `quantized` and `transposed` are those in its files."""

    tensors: Mapping[str, StoredTensor]
    updates: Mapping[str, Callable[[Tensor], Tensor]]  # by the adapter
    quantized: frozenset[str]  # during training
    transposed: frozenset[str]  # stored [in, out]
    quantizer: Quantizer | None
    base_dtype: torch.dtype  # in training, of what was not quantised
    out: torch.dtype
    as_stored: re.Pattern[str] | None  # what transformers keeps in fp32 in any case, and what is beside a text part
    device: torch.device

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

        write_weights(folder, written, merged(), shard_bytes)
        return rounded

    def weight(self, name: str) -> tuple[Tensor, bool]:
        """The weight as it is written, and whether it was rounded."""
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
        weight = weight.T.contiguous() if transposed else weight
        if name in self.quantized:
            assert self.quantizer is not None
            weight = self.quantizer.rounded(weight.float())
        if name in self.updates:
            weight = self.updates[name](weight)
        return weight.T.contiguous() if transposed else weight

    def _stays(self, name: str) -> bool:
        """Whether it is written as it is stored: what transformers keeps in fp32, integers, and fp8."""
        dtype = self.tensors[name].dtype
        kept = self.as_stored is not None and self.as_stored.search(name) is not None
        return kept or not dtype.is_floating_point or dtype.itemsize == 1

    def _written(self) -> dict[str, StoredTensor]:
        """The tensors in the order and the dtypes in which they are written."""
        return widest_first(
            {n: each if self._stays(n) else replace(each, dtype=self.out) for n, each in self.tensors.items()}
        )


def plan_merge(
    sections: ModelSections,
    updates: Mapping[str, Callable[[Tensor], Tensor]],
    dtype: str,
    device: torch.device,
    final: Path | None = None,
) -> Merge:
    """Find every weight that was quantised or has an adapter in the files of `sections.model.path`, or refuse.

    `final` is the folder of the adapter, for modules that were trained as a whole.
    """
    folder = Path(sections.model.path)
    if json.loads((folder / "config.json").read_text()).get("quantization_config"):
        raise ConfigError(
            f"kind=merged: the weights in {folder} are quantised already, and nothing is merged into such. "
            "Give kind=adapter."
        )
    base = BaseModel(sections.model, task_of(sections.task))
    lm, part, tensors = base.on_meta(), base.text_part, stored_tensors(folder)
    stored = FolderReader(lm if part is None else part.whole, tensors).stored_names()
    whole = {} if final is None else fully_trained_weights(final)
    beside: set[str] = set()  # files' tensors of what the text part is a part of
    if part is not None:
        updates = {part.in_text(layer) or layer: update for layer, update in updates.items()}
        whole = {part.in_text(name) or name: each for name, each in whole.items()}
        ours = {part.in_text(name): file for name, file in stored.items()}
        stored = {name: file for name, file in ours.items() if name is not None}
        beside = set(tensors).difference(stored.values())
    tensors = _with_whole(lm, tensors, stored, whole, pooled=task_of(sections.task).pooled)
    quantized = backbone_linear_layers(lm) if sections.quantizer is not None else []
    names = _names_in_files(lm, {*quantized, *updates}, tensors, stored, sections.model.path)
    frozen = sections.adapter.kind != "none"
    base_dtype = DTYPES[sections.precision].base if frozen else torch.float32
    kept = set(getattr(lm, "_keep_in_fp32_modules_strict", None) or ())
    if base_dtype == torch.float16:
        kept |= set(getattr(lm, "_keep_in_fp32_modules", None) or ())
    as_stored = [rf"(?:^|\.){re.escape(name)}(?:\.|$)" for name in sorted(kept)]
    as_stored += [f"^{re.escape(name)}$" for name in sorted(beside)]
    return Merge(
        tensors=tensors,
        updates={names[layer]: update for layer, update in updates.items()},
        quantized=frozenset(names[layer] for layer in quantized),
        transposed=frozenset(name for layer, name in names.items() if is_conv1d(lm.get_submodule(layer))),
        quantizer=sections.quantizer,
        base_dtype=base_dtype,
        out=EXPORTED[dtype],
        as_stored=re.compile("|".join(as_stored)) if as_stored else None,
        device=device,
    )


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
        if part is config or "dtype" in part or "torch_dtype" in part:
            part.pop("torch_dtype", None)
            part["dtype"] = str(EXPORTED[dtype]).removeprefix("torch.")
    config.pop("_name_or_path", None)
    return config


def _names_in_files(
    lm: Any, layers: Iterable[str], tensors: Mapping[str, StoredTensor], stored: Mapping[str, str], path: str
) -> dict[str, str]:
    """Names in the files by layer. A weight that transformers makes of several tensors has none, and is refused."""
    found, missing = {}, []
    for layer in sorted(layers):
        name = stored.get(f"{layer}.weight", "")
        if name in tensors and tensors[name].shape == lm.get_submodule(layer).weight.shape:
            found[layer] = name
        else:
            missing.append(layer)
    if missing:
        raise CheckpointError(
            f"kind=merged: the files of model.path={path} have no weight for {len(missing)} layers of the model "
            f"({', '.join(missing[:3])}{', ...' if missing[3:] else ''}) under their names or in their shapes. Give "
            "kind=adapter."
        )
    return found
