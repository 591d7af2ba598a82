"""Conversion between the tensors of a folder and model parameters, by the conversion rules of transformers.

transformers renames, stacks, splits and dequantizes the tensors of some kinds. A rule needs a few tensors of the
files; only these and their results are in memory at a time.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from app.base.base_weights import SourceTensor
from app.base.packed_weights import PACKED_FORMATS, PackedTensor, packed_format
from app.base.weight_files import StoredTensor, size_of
from app.config.schema import ModelConfig
from app.errors import ConfigError
from app.layers.quantization import Int4, Quantizer

READABLE = ("fp8", *PACKED_FORMATS)  # formats that are dequantized while loading, or used unchanged
BITSANDBYTES = "bitsandbytes"  # its weights are used as stored
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = "_scale_inv"  # suffix of scale patterns in the rules of transformers
_FORMATS_OF_SCALES = {  # of fp8 weights, by the names of their scales in files
    **dict.fromkeys(("weight_scale_inv", "scale", "qscale_weight"), ("fp8", "mxfp8")),
    "weight_scale": ("compressed-tensors", "fbgemm_fp8", "quark"),
}


def quantization_in(stored: Mapping[str, Any]) -> Any:
    """Return the section `quantization_config` of a config.json, None without one."""
    text = stored.get("text_config")  # of a composite
    return stored.get("quantization_config", text.get("quantization_config") if isinstance(text, dict) else None)


def stored_format(config: ModelConfig, stored: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the section `quantization_config` of a config.json, None without one; refuse an unsupported format."""
    quantization = quantization_in(stored)
    if quantization is None:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if isinstance(quantization, dict) and (quantization.get("load_in_4bit") or quantization.get("load_in_8bit")):
        method = BITSANDBYTES  # its older folders name no method
    by = method if isinstance(method, str) else "a method that its config.json does not name"
    if isinstance(quantization, dict) and method in (*READABLE, BITSANDBYTES):
        section = {**quantization, "quant_method": method}
        form = packed_format(section)
        reason = None if form is None else form.unsupported(section)
        if reason is None:
            return section
        by = f"{method} ({reason})"
    raise ConfigError(_refusal(config, by))


def without_scale(stored: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Return the fp8 weights of a folder without a scale under a name of the format in config.json."""
    quantization = quantization_in(stored)
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    scales = [name for name, formats in _FORMATS_OF_SCALES.items() if method in formats]
    fp8 = [name for name, tensor in tensors.items() if tensor.dtype in _FP8 and name.endswith(".weight")]
    weights = fp8 if scales else []
    return [n for n in weights if tensors.keys().isdisjoint(f"{n.removesuffix('weight')}{scale}" for scale in scales)]


def require_packed_alike(config: ModelConfig, lm: Any, quantizer: Quantizer | None) -> None:
    """Refuse bitsandbytes weights that the run does not use as stored."""
    quantization = getattr(lm.config, "quantization_config", None)
    if quantization is None:
        return
    if packed_format(quantization) is not None:
        _require_group_size(config, quantization, quantizer)
        return
    if not quantization.get("load_in_4bit"):
        raise ConfigError(_refusal(config, f"{BITSANDBYTES} in 8 bits"))
    kind = quantization.get("bnb_4bit_quant_type", "fp4")
    if quantizer is None or quantizer.kind != kind:
        raise ConfigError(
            f"model.path={config.path}: its weights are quantized to {kind} by {BITSANDBYTES}. Set recipe=qlora "
            f"quantization={kind} to use them unchanged."
        )


def _require_group_size(config: ModelConfig, section: Mapping[str, Any], quantizer: Quantizer | None) -> None:
    form = packed_format(section)
    size = None if form is None else form.group_size(section)
    if isinstance(quantizer, Int4) and quantizer.group_size != size:
        raise ConfigError(
            f"quantization.group_size={quantizer.group_size}: the weights of model.path={config.path} have groups of "
            f"{size}. Set quantization.group_size={size}."
        )


def require_all_packed(config: ModelConfig, weights: Iterable[SourceTensor], quantizer: Quantizer) -> None:
    """Refuse files that store only some of the weights to quantize in the format of the run."""
    packed = {tensor.name: tensor.packed is not None and tensor.packed.numbers == quantizer.kind for tensor in weights}
    if not any(packed.values()) or all(packed.values()):
        return
    plain = [name for name, is_packed in packed.items() if not is_packed]
    raise ConfigError(
        f"quantization.kind={quantizer.kind}: model.path={config.path} stores {len(plain)} of {len(packed)} weights "
        f"unquantized ({plain[0]}), and they would be rounded. Set quantization=nf4 or none."
    )


def _refusal(config: ModelConfig, by: str) -> str:
    return (
        f"model.path={config.path}: its weights are quantized with {by}, which is not supported. Set model.path to the "
        "unquantized model; recipe=qlora quantizes while loading."
    )


@dataclass(slots=True)
class _Conversion:
    """A conversion rule and its tensors in the files."""

    rule: Any  # WeightConverter of transformers
    target: str  # the first resulting parameter
    pieces: list[tuple[str, StoredTensor]] = field(default_factory=list)  # with the matching patterns

    def targets(self, model: Any) -> list[str]:
        """Return all resulting parameters; several are found by converting tensors on meta."""
        if len(self.rule.target_patterns) == 1:
            return [self.target]
        return list(self.convert(model, lambda place: torch.empty(place.shape, dtype=place.dtype, device="meta")))

    def convert(self, model: Any, read: Any) -> dict[str, Tensor]:
        """Return the parameters, from tensors that `read` returns."""
        for pattern, place in self.pieces:
            self.rule.add_tensor(self.target, place.name, pattern, partial(read, place))
        results = self.rule.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}


class FolderReader:
    """The tensors of a folder by parameter name of `model`, which is on meta.

    Tensors are read on use: one file is open and the results of one rule are cached at a time.
    """

    def __init__(
        self, model: Any, stored: Mapping[str, StoredTensor], quantization_config: dict[str, Any] | None = None
    ) -> None:
        self._model = model
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self._opened: tuple[Path | None, Any] = None, None
        self._converted: tuple[_Conversion | None, dict[str, Tensor]] = None, {}
        self._conversions = self._matched(stored, quantization_config)
        if any(conversion.rule is not None for conversion in self._conversions):
            self._model = deepcopy(model)  # rules need this: layers are replaced before weights are read
        self._format = quantization_config

    def remarks(self, packed_as: str | None) -> list[str]:
        """Return remarks on weights quantized in the files; `packed_as`: the run's quantization kind."""
        if self._format is None:
            return []
        method = self._format["quant_method"]
        pieces = (place for conversion in self._conversions for _, place in conversion.pieces)
        packed = [place for place in pieces if isinstance(place, PackedTensor) or place.dtype.itemsize == 1]
        kinds = {place.numbers for place in packed if isinstance(place, PackedTensor)}
        parts = (place.parts.values() if isinstance(place, PackedTensor) else [place] for place in packed)
        number = sum(map(size_of, chain.from_iterable(parts)))
        size = f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"
        if method == BITSANDBYTES or packed_as in kinds:
            return [f"model: {size} of weights quantized by {method}, used unchanged"]
        again = "" if packed_as is None else f" and quantized again to {packed_as}"
        again += "".join(f"; quantization={kind} uses them unchanged" for kind in kinds if again)
        return [f"model: {size} of {method} weights, dequantized while loading{again}"]

    def without_scale(self) -> list[str]:
        """Return the quantized weights without a scale."""
        unscaled = []
        for conversion in self._conversions:
            scaled = {
                place.name.rpartition(".")[0] for pattern, place in conversion.pieces if pattern.endswith(_SCALES)
            }
            weights = [place.name for pattern, place in conversion.pieces if place.dtype in _FP8]
            unscaled += [name for name in weights if name.rpartition(".")[0] not in scaled]
        return unscaled

    def tensors(self) -> dict[str, SourceTensor]:
        """Return the tensors in file order."""
        tensors = {}
        for conversion in self._conversions:
            _, place = conversion.pieces[0]
            if conversion.rule is None:
                whole, rows = partial(self._whole, place), partial(self._rows, place)
                packed = place if isinstance(place, PackedTensor) else None
                tensors[conversion.target] = SourceTensor(
                    conversion.target, place.shape, whole, rows, place.file.name, packed
                )
                continue
            for name in conversion.targets(self._model):
                whole, rows = partial(self._convert, conversion, name), partial(self._convert, conversion, name)
                tensors[name] = SourceTensor(name, self._shapes[name], whole, rows, place.file.name)
        return tensors

    def conversions(self) -> list[tuple[list[str], dict[str, StoredTensor]]]:
        """Return the resulting parameters and the tensors of each rule."""
        return [
            (conversion.targets(self._model), {place.name: place for _, place in conversion.pieces})
            for conversion in self._conversions
            if conversion.rule is not None
        ]

    def stored_names(self) -> dict[str, str]:
        """Return the name in the files of each parameter that is stored as one tensor."""
        return {plain.target: plain.pieces[0][1].name for plain in self._conversions if plain.rule is None}

    def _matched(self, stored: Mapping[str, StoredTensor], quantization_config: Any) -> list[_Conversion]:
        """Match the stored tensors with parameters; tensors without one are ignored."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        model, unpacker = self._model, _unpacker(quantization_config)
        rules = get_model_conversion_mapping(model, None, unpacker)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        parameters = model.state_dict()
        conversions: dict[str, _Conversion] = {}
        for name in sorted(stored, key=dot_natural_key):  # experts are stacked in this order
            target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)
            if target not in parameters and name in parameters:
                target, pattern = name, None
            if target not in parameters:
                continue
            rule = None if pattern is None else deepcopy(by_pattern[pattern])
            conversions.setdefault(target, _Conversion(rule, target)).pieces.append((pattern or "", stored[name]))
        for conversion in conversions.values():
            steps = () if conversion.rule is None else conversion.rule.operations
            if len(conversion.pieces) == 1 and all(hasattr(step, "hf_quantizer") for step in steps):
                conversion.rule = None  # not quantized: rows can be read separately
        position = {name: at for at, name in enumerate(stored)}
        return sorted(conversions.values(), key=lambda conversion: position[conversion.pieces[0][1].name])

    def _content(self, file: Path) -> Any:
        if self._opened[0] != file:
            self._opened = file, safe_open(str(file), framework="pt", device="cpu")
        return self._opened[1]

    def _whole(self, place: StoredTensor) -> Tensor:
        if isinstance(place, PackedTensor):
            return place.read()
        whole: Tensor = self._content(place.file).get_tensor(place.name)
        return whole

    def _rows(self, place: StoredTensor, low: int, high: int) -> Tensor:
        if isinstance(place, PackedTensor):
            return place.read()[low:high]
        rows: Tensor = self._content(place.file).get_slice(place.name)[low:high]
        return rows

    def _convert(self, conversion: _Conversion, name: str, low: int | None = None, high: int | None = None) -> Tensor:
        if self._converted[0] is not conversion:
            self._converted = None, {}  # freed before the next ones are read
            self._converted = conversion, conversion.convert(self._model, self._whole)
        tensor = self._converted[1][name]
        packed = getattr(tensor, "quant_state", None)  # of a parameter of bitsandbytes
        shape = tensor.shape if packed is None else packed.shape
        if shape != self._shapes[name]:
            raise ValueError(f"{name} becomes {tuple(shape)}, the model has {tuple(self._shapes[name])}")
        if packed is not None:
            return tensor
        return tensor.detach() if low is None else tensor.detach()[low:high]


def _unpacker(quantization_config: dict[str, Any] | None) -> Any:
    """Return the transformers quantizer that adds the rules of a quantized format; None for one of ours."""
    if quantization_config is None or quantization_config["quant_method"] in PACKED_FORMATS:
        return None
    from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

    unpacking = {} if quantization_config["quant_method"] == BITSANDBYTES else {"dequantize": True}
    config = AutoQuantizationConfig.from_dict({**quantization_config, **unpacking})
    return AutoHfQuantizer.from_config(config, pre_quantized=True)


# ---- converted weights


@dataclass(frozen=True, slots=True)
class _Group:
    """The parameters of one conversion rule."""

    reads: Mapping[str, Callable[[], Tensor]]  # by their names in the model
    stored: frozenset[str]  # names of their tensors in the files
    saved: Mapping[str, Tensor]  # the tensors that transformers saves, on meta


@dataclass(frozen=True, slots=True)
class ConvertedWeights:
    """Some parameters of a folder, in groups that are read, changed and converted back together."""

    model: Any
    groups: tuple[_Group, ...]
    _ready: dict[str, Tensor] = field(default_factory=dict)  # converted with others, not taken yet

    @classmethod
    def of(cls, model: Any, reader: FolderReader, parameters: Collection[str], *, unpacked: bool) -> "ConvertedWeights":
        """Return the converted ones of `parameters`; with `unpacked` all parameters that are dequantized too."""
        from transformers.core_model_loading import revert_weight_conversion

        groups, tensors, shapes = [], reader.tensors(), {n: tensor.shape for n, tensor in model.state_dict().items()}
        for targets, pieces in reader.conversions():
            is_packed = unpacked and any(piece.dtype.itemsize == 1 for piece in pieces.values())
            if is_packed or not set(parameters).isdisjoint(targets):
                on_meta = {name: torch.empty(shapes[name], device="meta") for name in targets}
                saved = revert_weight_conversion(model, on_meta)
                if is_packed or saved.keys() == pieces.keys():
                    reads = {name: tensors[name].whole for name in targets}
                    groups.append(_Group(reads, frozenset(pieces), saved))
        return cls(model, tuple(groups))

    @property
    def parameters(self) -> set[str]:
        return {name for group in self.groups for name in group.reads}

    @property
    def names(self) -> dict[str, _Group]:
        """The groups by the names of their saved tensors."""
        return {name: group for group in self.groups for name in group.saved}

    def in_place(self, tensors: Mapping[str, StoredTensor], dtype: torch.dtype) -> dict[str, StoredTensor]:
        """Return the tensors of a folder, with the saved tensors of each group in place of its first stored one."""
        of_stored = {name: group for group in self.groups for name in group.stored}
        replaced: dict[str, StoredTensor] = {}
        for name, place in tensors.items():
            if name not in of_stored:
                replaced[name] = place
                continue
            for saved, like in of_stored[name].saved.items():
                changed = replace(place, file=Path(), name=saved, shape=like.shape, dtype=dtype)
                replaced.setdefault(saved, changed)
        return replaced

    def take(self, name: str, changed: Callable[[str, Tensor], Tensor]) -> Tensor:
        """Return a saved tensor; `changed` maps name and value of each parameter in its group."""
        from transformers.core_model_loading import revert_weight_conversion

        if name not in self._ready:
            group = self.names[name]
            values = {parameter: changed(parameter, read()) for parameter, read in group.reads.items()}
            self._ready.update(revert_weight_conversion(self.model, values))
        return self._ready.pop(name)
