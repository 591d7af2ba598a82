"""Conversion between the tensors of a folder and a model's parameters, by transformers' own conversion rules.

transformers renames, stacks, splits and unpacks what some kinds have in their files. What one rule makes needs a few
tensors of the files, and no more than these and their results are in memory at a time.
"""

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from app.base.base_weights import SourceTensor
from app.base.weight_files import StoredTensor, size_of
from app.config.schema import ModelConfig
from app.errors import ConfigError
from app.layers.quantization import Quantizer

UNPACKED = ("fp8", "mxfp4")  # quantized formats that are unpacked as they are read
BITSANDBYTES = "bitsandbytes"  # its weights are used as they are stored
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = ("_scale_inv", "_scales")  # end the patterns of scales in the rules of transformers
_FORMATS_OF_SCALES = {  # of fp8 weights, by the names of their scales in files
    **dict.fromkeys(("weight_scale_inv", "scale", "qscale_weight"), ("fp8", "mxfp8")),
    "weight_scale": ("compressed-tensors", "fbgemm_fp8", "quark"),
}


def quantization_in(stored: Mapping[str, Any]) -> Any:
    """Return the section `quantization_config` of a config.json, None without one."""
    text = stored.get("text_config")  # of a whole that reads more than text
    return stored.get("quantization_config", text.get("quantization_config") if isinstance(text, dict) else None)


def stored_format(config: ModelConfig, stored: Mapping[str, Any]) -> dict[str, Any] | None:
    """The section `quantization_config` of a config.json, None without one; a format that is not read is refused."""
    given = quantization_in(stored)
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else None
    if isinstance(given, dict) and (given.get("load_in_4bit") or given.get("load_in_8bit")):
        method = BITSANDBYTES  # its older folders name no method
    if isinstance(given, dict) and method in (*UNPACKED, BITSANDBYTES):
        return {**given, "quant_method": method}
    by = method if isinstance(method, str) else "a method that its config.json does not name"
    raise ConfigError(_refusal(config, by))


def without_scale(stored: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Return the fp8 weights of a folder that have no scale under a name of the format in its config.json."""
    given = quantization_in(stored)
    method = given.get("quant_method") if isinstance(given, dict) else None
    scales = [name for name, formats in _FORMATS_OF_SCALES.items() if method in formats]
    weights = [name for name, each in tensors.items() if scales and each.dtype in _FP8 and name.endswith(".weight")]
    return [n for n in weights if tensors.keys().isdisjoint(f"{n.removesuffix('weight')}{each}" for each in scales)]


def require_packed_alike(config: ModelConfig, lm: Any, quantizer: Quantizer | None) -> None:
    """Refuse weights of bitsandbytes that the run does not use as they are stored."""
    given = getattr(lm.config, "quantization_config", None)
    if given is None:
        return
    if not given.get("load_in_4bit"):
        raise ConfigError(_refusal(config, f"{BITSANDBYTES} in 8 bits"))
    kind = given.get("bnb_4bit_quant_type", "fp4")
    if quantizer is None or quantizer.kind != kind:
        raise ConfigError(
            f"model.path={config.path}: its weights are quantized to {kind} by {BITSANDBYTES}. Set recipe=qlora "
            f"quantization={kind} to use them unchanged."
        )


def _refusal(config: ModelConfig, by: str) -> str:
    return (
        f"model.path={config.path}: its weights are quantized with {by}, which is not supported. Set model.path to the "
        "unquantized model; recipe=qlora quantizes while loading."
    )


@dataclass(slots=True)
class _Conversion:
    """A rule, and the tensors of the files that it takes."""

    rule: Any  # WeightConverter of transformers
    target: str  # the first parameter that it makes
    pieces: list[tuple[str, StoredTensor]] = field(default_factory=list)  # with the patterns that they match

    def targets(self, model: Any) -> list[str]:
        """All parameters that it makes; of several, as the rule names them for tensors on meta."""
        if len(self.rule.target_patterns) == 1:
            return [self.target]
        return list(self.made(model, lambda place: torch.empty(place.shape, dtype=place.dtype, device="meta")))

    def made(self, model: Any, read: Any) -> dict[str, Tensor]:
        for pattern, place in self.pieces:
            self.rule.add_tensor(self.target, place.name, pattern, partial(read, place))
        made = self.rule.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class FolderReader:
    """The tensors of a folder by the names of the parameters of `model`, which is on meta.

    Each is read when it is asked for: one file is open, and the results of one rule are kept, at a time.
    """

    def __init__(
        self, model: Any, stored: Mapping[str, StoredTensor], quantization_config: dict[str, Any] | None = None
    ) -> None:
        self._model = model
        self._shapes = {name: each.shape for name, each in model.state_dict().items()}
        self._opened: tuple[Path | None, Any] = None, None
        self._made: tuple[_Conversion | None, dict[str, Tensor]] = None, {}
        self._conversions = self._matched(stored, quantization_config)
        if any(each.rule is not None for each in self._conversions):
            self._model = deepcopy(model)  # as rules ask for it: layers are replaced before weights are read
        self._format = quantization_config

    def remarks(self, packed_as: str | None) -> list[str]:
        """What becomes of weights that are quantized in the files; `packed_as`: the run's kind of quantization."""
        if self._format is None:
            return []
        method = self._format["quant_method"]
        packed = [place for each in self._conversions for _, place in each.pieces if place.dtype.itemsize == 1]
        number = sum(map(size_of, packed))
        size = f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"
        if method == BITSANDBYTES:
            return [f"model: {size} of weights quantized by {BITSANDBYTES}, used unchanged"]
        again = "" if packed_as is None else f" and quantized again to {packed_as}"
        return [f"model: {size} of {method} weights, dequantized while loading{again}"]

    def without_scale(self) -> list[str]:
        """Return the quantized weights that are read without a scale."""
        found = []
        for each in self._conversions:
            scaled = {place.name.rpartition(".")[0] for pattern, place in each.pieces if pattern.endswith(_SCALES)}
            weights = [
                place.name
                for pattern, place in each.pieces
                if place.dtype in _FP8 or pattern.endswith("_blocks")  # of MXFP4
            ]
            found += [name for name in weights if name.rpartition(".")[0] not in scaled]
        return found

    def tensors(self) -> dict[str, SourceTensor]:
        """In the order of the files."""
        found = {}
        for each in self._conversions:
            _, place = each.pieces[0]
            if each.rule is None:
                whole, rows = partial(self._whole, place), partial(self._rows, place)
                found[each.target] = SourceTensor(each.target, place.shape, whole, rows, place.file.name)
                continue
            for name in each.targets(self._model):
                whole, rows = partial(self._convert, each, name), partial(self._convert, each, name)
                found[name] = SourceTensor(name, self._shapes[name], whole, rows, place.file.name)
        return found

    def conversions(self) -> list[tuple[list[str], dict[str, StoredTensor]]]:
        """The parameters that each rule makes, and the tensors that it takes."""
        return [
            (each.targets(self._model), {place.name: place for _, place in each.pieces})
            for each in self._conversions
            if each.rule is not None
        ]

    def stored_names(self) -> dict[str, str]:
        """The name in the files of each parameter that is one tensor there."""
        return {each.target: each.pieces[0][1].name for each in self._conversions if each.rule is None}

    def _matched(self, stored: Mapping[str, StoredTensor], quantization_config: Any) -> list[_Conversion]:
        """What makes the parameters; tensors that make none are passed over."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        model, unpacker = self._model, None if quantization_config is None else _unpacker(quantization_config)
        rules = get_model_conversion_mapping(model, None, unpacker)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        known = model.state_dict()
        found: dict[str, _Conversion] = {}
        for name in sorted(stored, key=dot_natural_key):  # experts are stacked in this order
            target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
            if target not in known and name in known:
                target, pattern = name, None
            if target not in known:
                continue
            rule = None if pattern is None else deepcopy(by_pattern[pattern])
            found.setdefault(target, _Conversion(rule, target)).pieces.append((pattern or "", stored[name]))
        for each in found.values():
            steps = () if each.rule is None else each.rule.operations
            if len(each.pieces) == 1 and all(hasattr(step, "hf_quantizer") for step in steps):
                each.rule = None  # not quantized: its rows can be read by themselves
        position = {name: at for at, name in enumerate(stored)}
        return sorted(found.values(), key=lambda each: position[each.pieces[0][1].name])

    def _content(self, file: Path) -> Any:
        if self._opened[0] != file:
            self._opened = file, safe_open(str(file), framework="pt", device="cpu")
        return self._opened[1]

    def _whole(self, place: StoredTensor) -> Tensor:
        whole: Tensor = self._content(place.file).get_tensor(place.name)
        return whole

    def _rows(self, place: StoredTensor, low: int, high: int) -> Tensor:
        rows: Tensor = self._content(place.file).get_slice(place.name)[low:high]
        return rows

    def _convert(self, conversion: _Conversion, name: str, low: int | None = None, high: int | None = None) -> Tensor:
        if self._made[0] is not conversion:
            self._made = None, {}  # freed before the next are read
            self._made = conversion, conversion.made(self._model, self._whole)
        tensor = self._made[1][name]
        packed = getattr(tensor, "quant_state", None)  # of a parameter of bitsandbytes
        shape = tensor.shape if packed is None else packed.shape
        if shape != self._shapes[name]:
            raise ValueError(f"{name} becomes {tuple(shape)}, the model has {tuple(self._shapes[name])}")
        if packed is not None:
            return tensor
        return tensor.detach() if low is None else tensor.detach()[low:high]


def _unpacker(quantization_config: dict[str, Any]) -> Any:
    """What adds the rules of a quantized format."""
    from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

    unpacking = {} if quantization_config["quant_method"] == BITSANDBYTES else {"dequantize": True}
    given = AutoQuantizationConfig.from_dict({**quantization_config, **unpacking})
    return AutoHfQuantizer.from_config(given, pre_quantized=True)


# ---- converted weights


@dataclass(frozen=True, slots=True)
class _Group:
    """The parameters of one conversion rule."""

    reads: Mapping[str, Callable[[], Tensor]]  # by their names in the model
    stored: frozenset[str]  # names of the tensors that they are made of
    saved: Mapping[str, Tensor]  # what transformers saves of them, on meta


@dataclass(frozen=True, slots=True)
class ConvertedWeights:
    """Some parameters of a folder, by groups that are read, changed and turned back together."""

    model: Any
    groups: tuple[_Group, ...]
    _ready: dict[str, Tensor] = field(default_factory=dict)  # tensors that were made with others, until they are taken

    @classmethod
    def of(cls, model: Any, reader: FolderReader, wanted: Collection[str], *, unpacked: bool) -> "ConvertedWeights":
        """Those of the parameters `wanted` that are made of others, and all that are unpacked."""
        from transformers.core_model_loading import revert_weight_conversion

        groups, known, shapes = [], reader.tensors(), {n: each.shape for n, each in model.state_dict().items()}
        for targets, pieces in reader.conversions():
            is_packed = unpacked and any(each.dtype.itemsize == 1 for each in pieces.values())
            if is_packed or not set(wanted).isdisjoint(targets):
                on_meta = {name: torch.empty(shapes[name], device="meta") for name in targets}
                saved = revert_weight_conversion(model, on_meta)
                if is_packed or saved.keys() == pieces.keys():
                    reads = {name: known[name].whole for name in targets}
                    groups.append(_Group(reads, frozenset(pieces), saved))
        return cls(model, tuple(groups))

    @property
    def parameters(self) -> set[str]:
        return {name for group in self.groups for name in group.reads}

    @property
    def names(self) -> dict[str, _Group]:
        """Return the groups by the names of their saved tensors."""
        return {name: group for group in self.groups for name in group.saved}

    def in_place(self, tensors: Mapping[str, StoredTensor], dtype: torch.dtype) -> dict[str, StoredTensor]:
        """Return the tensors of a folder, with saved ones in place of the first stored one of each group."""
        of_stored = {name: group for group in self.groups for name in group.stored}
        found: dict[str, StoredTensor] = {}
        for name, place in tensors.items():
            if name not in of_stored:
                found[name] = place
                continue
            for saved, like in of_stored[name].saved.items():
                changed = replace(place, file=Path(), name=saved, shape=like.shape, dtype=dtype)
                found.setdefault(saved, changed)
        return found

    def take(self, name: str, changed: Callable[[str, Tensor], Tensor]) -> Tensor:
        """A saved tensor; `changed` is given each parameter of its group, by name."""
        from transformers.core_model_loading import revert_weight_conversion

        if name not in self._ready:
            group = self.names[name]
            values = {each: changed(each, read()) for each, read in group.reads.items()}
            self._ready.update(revert_weight_conversion(self.model, values))
        return self._ready.pop(name)
