"""Export in the format of compressed-tensors, which vLLM serves and transformers reads: fp8, int8 and packed int4.

Weights are rounded to nearest without calibration data, with one scale for each output of a layer, or for each group of
its inputs. They are merged, rounded and written one at a time.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from app.base.weight_files import StoredTensor, size_of, widest_first, write_weights
from app.config.tasks import task_of
from app.errors import ConfigError
from app.exports.destination import write_json_unflushed
from app.exports.kinds import MergedExport, on_improvement
from app.exports.verify import Reference, Reloaded, Verification, by_transformers
from app.finished.save import EXPORTED
from app.layers.packed_linear import round_to_int4
from app.layers.quantization import backbone_linear_layers, is_linear
from app.pages.model_card import Loading

GROUP = 128  # inputs that share a scale in int4
_TILE = 16  # products of 8-bit numbers on a GPU need sizes that are multiples of it
_EXPERTS, _EXPERTS_PATTERN = ".experts.", r"re:.*\.experts\..*"

Parts = dict[str, Tensor]  # tensors of a quantized weight, by the last part of their names


def _scaled(rows: Tensor, low: float, high: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows [..., size] divided by their scales, from `low` to `high`, and the scales [..., 1] in `dtype`."""
    wide = rows.float()
    scale = (wide.abs().amax(-1, keepdim=True) / ((high - low) / 2)).to(dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (wide / scale.float()).clamp_(low, high), scale


def pack_fp8(weight: Tensor, dtype: torch.dtype) -> Parts:
    """Return a weight [out, in] in e4m3 with a scale for each output."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    numbers, scale = _scaled(weight, -largest, largest, dtype)
    return {"weight": numbers.to(torch.float8_e4m3fn), "weight_scale": scale}


def pack_int8(weight: Tensor, dtype: torch.dtype) -> Parts:
    """Return a weight [out, in] in int8 with a scale for each output."""
    numbers, scale = _scaled(weight, -128, 127, dtype)
    return {"weight": numbers.round_().to(torch.int8), "weight_scale": scale}


def pack_int4(weight: Tensor, dtype: torch.dtype) -> Parts:
    """Return a weight [out, in] in int4: eight consecutive inputs in an int32, the first in its lowest bits."""
    packed = round_to_int4(weight, GROUP, dtype)
    words = packed.codes.view(torch.int32)
    return {"weight_packed": words, "weight_scale": packed.scale, "weight_shape": torch.tensor(weight.shape)}


class Format(NamedTuple):
    """A format of compressed-tensors, and the allowed differences of an export."""

    name: str  # in config.json
    weights: Mapping[str, Any]
    rows: str | None  # type of layer inputs, which the serving program rounds; None: unrounded
    pack: Callable[[Tensor, torch.dtype], Parts]
    multiple: int  # of the inputs of a layer
    max_kl: float  # nats per position
    max_loss_difference: float  # nats, relative to a loss above 1
    min_kept_share: float | None = None  # of the loss improvement from training

    def unsupported(self, shape: torch.Size) -> str | None:
        """Return why a weight [out, in] stays unquantized."""
        outputs, inputs = shape
        if inputs % self.multiple:
            return f"{inputs} inputs, not a multiple of {self.multiple}"
        return f"{outputs} outputs, not a multiple of {_TILE}" if outputs % _TILE else None

    def config(self, ignored: list[str]) -> dict[str, Any]:
        """Return the section `quantization_config` of config.json; `ignored`: names of unquantized layers."""
        rows = None if self.rows is None else _numbers(8, self.rows, "token", dynamic=True)
        group = {"targets": ["Linear"], "weights": self.weights, "input_activations": rows, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": self.name,
            "quantization_status": "compressed",
            "ignore": ignored,
            "config_groups": {"group_0": group},
        }


def _numbers(bits: int, kind: str, strategy: str, *, dynamic: bool = False, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": dynamic, **more}


FORMATS = {
    "fp8": Format("float-quantized", _numbers(8, "float", "channel"), "float", pack_fp8, _TILE, 0.05, 0.05),
    "w8a8": Format("int-quantized", _numbers(8, "int", "channel"), "int", pack_int8, _TILE, 0.05, 0.05),
    "w4a16": Format(
        "pack-quantized", _numbers(4, "int", "group", group_size=GROUP), None, pack_int4, GROUP, 0.5, 0.25, 0.9
    ),
}


class CompressedExport(MergedExport):
    """Merged model with the linear layers of its backbone in the format of compressed-tensors."""

    measure = "kl"

    @property
    def format(self) -> Format:
        return FORMATS[self.config.quant]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of unquantized weights and of scales."""
        return EXPORTED[self.config.dtype]

    @cached_property
    def layers(self) -> dict[str, torch.Size]:
        """Shapes of the linear layers in the backbone that are stored as one matrix, by file names of their weights."""
        lm, names = self.evaluation.base.on_meta(), self.merge.names
        linear = [name for name in backbone_linear_layers(lm) if type(lm.get_submodule(name)) is nn.Linear]
        stored = {names.files.get(f"{name}.weight") for name in linear}
        written = self.merge.written.items()
        return {name: place.shape for name, place in written if name in stored and place.dtype == self.dtype}

    @cached_property
    def reasons(self) -> list[str]:
        """Reasons why some layers stay unquantized, with their names."""
        reasons = {name: self.format.unsupported(shape) for name, shape in self.layers.items()}
        return [f"{name.removesuffix('.weight')} has {reason}" for name, reason in reasons.items() if reason]

    @cached_property
    def quantized(self) -> dict[str, torch.Size]:
        """Shapes of the weights to quantize, by their names in the files of a merged model; raises without any."""
        quantized = {name: shape for name, shape in self.layers.items() if self.format.unsupported(shape) is None}
        if not quantized:
            reason = next(iter(self.reasons), "it has no nn.Linear that is stored as one matrix")
            raise ConfigError(
                f"quant={self.config.quant}: no layer of this model can be quantized ({reason}). Set kind=merged."
            )
        experts = [name for name in self.merge.written if _EXPERTS in name and name.endswith(".weight")]
        if experts and self.format.weights["type"] == "int":
            raise ConfigError(
                f"quant={self.config.quant}: with integers, transformers does not read unquantized experts "
                f"({experts[0]}). Set quant=fp8, or kind=merged."
            )
        return quantized

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """The written tensors. Sizes of quantized ones are multiples of 8 bytes, so this order keeps all aligned."""
        tensors: dict[str, StoredTensor] = {}
        for name, shape in self.quantized.items():
            with torch.device("meta"):
                parts = self.format.pack(torch.empty(shape), self.dtype)
            for part, tensor in parts.items():
                key = name.removesuffix("weight") + part
                tensors[key] = replace(self.merge.written[name], name=key, shape=tensor.shape, dtype=tensor.dtype)
        return tensors | widest_first({name: self.merge.written[name] for name in self._unquantized})

    @property
    def _unquantized(self) -> list[str]:
        return [name for name in self.merge.written if name not in self.quantized]

    @property
    def bytes(self) -> int:
        return sum(map(size_of, self.tensors.values())) + sum(file.stat().st_size for file in self.copied.values())

    def write_weights(self, folder: Path) -> int:
        write_weights(folder, self.tensors, self._in_order(), self.config.shard_gb * 1e9)
        config = json.loads((folder / "config.json").read_text())
        write_json_unflushed(
            folder / "config.json", {**config, "quantization_config": self.format.config(self.ignored)}
        )
        return 0

    def _in_order(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in the order of `tensors`, quantized from one merged weight at a time."""
        for name in self.quantized:
            for part, tensor in self.format.pack(self.merge.weight(name)[0], self.dtype).items():
                yield name.removesuffix("weight") + part, tensor
        for name in widest_first({name: self.merge.written[name] for name in self._unquantized}):
            yield name, self.merge.weight(name)[0]

    @cached_property
    def ignored(self) -> list[str]:
        """Names of unquantized layers, as in the model of transformers and as in the files, which vLLM reads."""
        base, names = self.evaluation.base, self.merge.names
        inside = {names.of_folder(str(names.of_file(name))).removesuffix(".weight") for name in self.quantized}
        linear = [name for name, layer in base.folder_model.named_modules() if is_linear(layer) and name not in inside]
        matrices = [name for name in self._unquantized if len(self.merge.written[name].shape) == 2]
        stored = [name.removesuffix(".weight") for name in matrices if name.endswith(".weight")]
        names_of_all = [*dict.fromkeys([*linear, *stored])]
        has_experts = bool(base.stacks_of_experts) or any(_EXPERTS in name for name in names_of_all)
        return [name for name in names_of_all if _EXPERTS not in name] + [_EXPERTS_PATTERN] * has_experts

    def reload(self, folder: Path, reference: Reference) -> Reloaded | str:
        loading = {"dtype": "auto", "rounded_rows": self.format.rows}
        return by_transformers(folder, loading, reference, self.evaluation)

    @property
    def notes(self) -> list[str]:
        """Notes on layers that stay in `dtype`."""
        stay, stacks = f"stay in {self.config.dtype}", self.evaluation.base.stacks_of_experts
        count = f"{len(self.reasons)} of {len(self.layers)} linear layers"
        notes = [f"{count} {stay}: {reason}" for reason in self.reasons[:1]]
        return notes + [f"expert stacks {stay}: {name}" for name in stacks[:1]]

    def on_card(self, loading: Loading, verified: Verification) -> Loading:
        quantized = (
            f"Quantized to {self.config.quant} in the format of compressed-tensors: vLLM serves it (vllm serve .), "
            f"transformers needs the package compressed-tensors. KL from the model of the run: {verified.kl:.2g} nats, "
            f"the mean of {verified.positions} positions of {verified.rows} rows "
            f"({verified.rows_are.replace('_', ' ')}).{on_improvement(verified)}"
        )
        return replace(loading, quantized=" ".join([quantized, *(f"Note: {note}." for note in self.notes)]))

    def remarks(self) -> list[tuple[str, str]]:
        serve = f"vllm serve {self.config.to}" if task_of(self.sections.task).writes_text else ""
        return [(label, text) for label, text in (("note", "\n".join(self.notes)), ("vllm", serve)) if text]

    def tolerance(self, rounded: int) -> tuple[float, str]:  # noqa: ARG002
        return self.format.max_kl, f"of {self.config.quant}"

    @property
    def max_loss_difference(self) -> float | None:
        return self.format.max_loss_difference

    @property
    def min_kept_share(self) -> float | None:
        return self.format.min_kept_share
