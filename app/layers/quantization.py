"""Quantization of the frozen base: layers that replace the backbone's linear ones, and the error of number formats.

Head and embeddings are not quantized. NF4 and FP4 are in `layers.nf4` (by bitsandbytes), int8 and fp8 in
`layers.frozen_linear`, the 4-bit formats of published models in `layers.packed_linear`. For the error, a group of
weights is divided by its scale, rounded to the numbers of the format, and multiplied by the scale.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from app.config.schema import ModelConfig, QuantizationConfig
from app.errors import ConfigError
from app.layers import experts, nf4
from app.layers.frozen_linear import OUTLIER_THRESHOLD, Fp8Linear, Int8Linear, LlmInt8Linear
from app.layers.head import in_backbone
from app.layers.packed_linear import (
    GROUPS,
    INT4,
    MXFP4,
    NVFP4,
    PackedLinear,
    PackedWeight,
    round_to_int4,
    round_to_mxfp4,
    round_to_nvfp4,
)
from app.layers.recurrent import layers_read_past

_QAT_GROUP = 32  # weights that share a scale
_FP8_MIN_CAPABILITY = (8, 9)  # Ada, the first GPUs with fp8; then Hopper


class Quantizer(ABC):
    """One kind of quantization, for building, loading and planning a model."""

    kind: str  # the value of quantization.kind
    # whether the adapter compensates for the rounding: then it is used later on a base with the same quantization
    needed_by_adapter: bool
    packs_experts = True  # whether expert stacks are quantized too
    by_outputs = False  # whether a stack [experts, in, out] is quantized as rows of outputs, else of inputs
    packs = True  # whether weights are frozen and stored in fewer bits; else they are trained, and rounded on use
    card = ""  # note for users of the trained model

    def quantize(self, lm: Any) -> None:
        """Replace every plain linear layer of the backbone one by one, so that full weights are freed early."""
        for name in self.layers(lm):
            lm.set_submodule(name, self.quantized(lm.get_submodule(name)))
        if self.packs_experts:
            experts.pack(lm, self)
        self.finish(lm)

    def layers(self, lm: Any) -> list[str]:
        """Return the names of the linear layers that are quantized."""
        return backbone_linear_layers(lm)

    def finish(self, lm: Any) -> None:
        """Prepare a model after its layers are quantized."""
        left = self.layers(lm)
        assert not left, f"not quantized: {left}"

    @abstractmethod
    def quantized(self, layer: Any) -> nn.Module:
        """Return the frozen layer that replaces a plain linear one."""

    def stored(self, packed: PackedWeight) -> nn.Module:
        """Return the layer of a weight that the files store in the format of this kind."""
        raise NotImplementedError(f"stored: {packed.numbers} weights as {self.kind}")

    def unpacked(self, layer: Any, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight [out, in] of a quantized layer, for a kind that packs weights."""
        raise NotImplementedError(f"unpacked: the weight of a layer in {self.kind}")

    def share_state(self, quantized: nn.Module, layer: nn.Module) -> None:  # noqa: B027
        """Copy the state of `quantized` other than parameters and buffers to `layer`, quantized on meta."""

    def use_stored_shapes(self, network: nn.Module) -> None:  # noqa: B027
        """Give parameters of quantized layers on meta the shapes of their bytes, as FSDP gathers them."""

    def fake(self, layer: nn.Module) -> None:  # noqa: B027
        """Create other state than parameters and buffers of a layer quantized on meta, for a plan on fake tensors."""

    def constants(self, network: nn.Module) -> list[Tensor]:  # noqa: ARG002
        """Return tensors of the quantized layers in `network` other than parameters and buffers."""
        return []

    @abstractmethod
    def rounded(self, weight: Tensor) -> Tensor:
        """Return a weight [out, in] after quantizing and dequantizing, in its dtype."""

    def unsupported(self, name: str, outputs: int, inputs: int) -> str | None:  # noqa: ARG002
        """Return why a layer of these sizes cannot be quantized."""
        return None

    def require_quantizable(self, config: ModelConfig, lm: Any) -> None:
        """Refuse layers that cannot be quantized, or not correctly, by name; `lm` may be on meta."""
        kind = lm.config.model_type

        def refuse(reason: str) -> None:
            source = "model.architecture" if config.weights == "random" else f"model.path={config.path}"
            raise ConfigError(
                f"quantization.kind={self.kind}: a model of kind {kind} ({source}) cannot be quantized: "
                f"{reason}. Set {'recipe=lora or ' * self.packs}quantization=none, or choose another model."
            )

        other, stacks = experts.other_stacks(lm), experts.stacks_of(lm)
        if other:
            refuse(f"{other[0]} stores its experts in another layout than transformers' experts interface")
        if stacks and not self.packs_experts:
            refuse(f"its experts are stacked, and stacks cannot be quantized to {self.kind}")
        sizes = {name: weight_of(lm.get_submodule(name)).shape for name in self.layers(lm)}
        for name, size in {**sizes, **experts.sizes_of_rows(lm, self)}.items():
            reason = self.unsupported(name, *size)
            if reason is not None:
                refuse(reason)

    def missing_on(self, device: torch.device) -> str | None:  # noqa: ARG002
        """Return what `device` lacks to compute with quantized layers, and the fix."""
        return None

    def notes(self, device: str) -> list[str]:  # noqa: ARG002
        """Return notes on a run on this device type that its recipe does not show."""
        return []

    def bitsandbytes_arguments(self, outside: list[str]) -> dict[str, Any] | None:  # noqa: ARG002
        """Return BitsAndBytesConfig arguments for the same quantization except in `outside`; None if there are none."""
        return None


@dataclass(frozen=True, slots=True)
class Bits4(Quantizer):
    """4-bit quantization by bitsandbytes."""

    needed_by_adapter = True
    use_stored_shapes = staticmethod(nf4.use_stored_shapes)
    fake = staticmethod(nf4.fake)
    constants = staticmethod(nf4.constants)
    rounded = experts.packed_and_unpacked

    kind: str  # nf4 or fp4
    double_quant: bool
    compute: torch.dtype

    def bitsandbytes_arguments(self, outside: list[str]) -> dict[str, Any]:
        """Return BitsAndBytesConfig arguments, with dtypes by name as in transformers."""
        return {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": self.kind,
            "bnb_4bit_use_double_quant": self.double_quant,
            "bnb_4bit_compute_dtype": str(self.compute).removeprefix("torch."),
            "llm_int8_skip_modules": outside,
        }

    def quantized(self, layer: Any) -> nn.Module:
        is_packed = hasattr(layer.weight, "quant_state")  # quantized in the files
        weight = layer.weight if is_packed else weight_of(layer)
        return nf4.linear_4bit(weight, layer.bias, self.kind, double_quant=self.double_quant, compute=self.compute)

    def unpacked(self, layer: Any, dtype: torch.dtype) -> Tensor:
        return nf4.dequantized(layer).to(dtype)

    def share_state(self, quantized: Any, layer: Any) -> None:
        layer.quant_state = quantized.quant_state
        quantized.weight.module = layer

    def unsupported(self, name: str, outputs: int, inputs: int) -> str | None:
        if inputs % nf4.BLOCK:
            return f"{name} has {inputs} inputs, not a multiple of {nf4.BLOCK}"
        if outputs * inputs > nf4.MAX_NUMBERS:
            return f"{name} has {outputs * inputs:,} weights, and kernels of bitsandbytes support {nf4.MAX_NUMBERS:,}"
        return None

    def finish(self, lm: Any) -> None:
        """Mark the model as 4-bit for PEFT, and use our forward."""
        nf4.install_forward(lm)
        lm.is_loaded_in_4bit = True
        Quantizer.finish(self, lm)  # a dataclass with slots is a new class, so super() would fail


class Bits8(Quantizer):
    """8-bit quantization in training; later the adapter is used on the plain base, as the error is small."""

    needed_by_adapter = False
    rounded = experts.packed_and_unpacked
    layer: type[Int8Linear | Fp8Linear]
    multiple = 1  # of the sizes of its products on a GPU

    def quantized(self, layer: Any) -> nn.Module:
        return self.layer(weight_of(layer), layer.bias)

    def unpacked(self, layer: Any, dtype: torch.dtype) -> Tensor:
        result: Tensor = layer.unpacked(dtype)
        return result

    def unsupported(self, name: str, outputs: int, inputs: int) -> str | None:
        if outputs % self.multiple or inputs % self.multiple:
            return f"{name} has {inputs} inputs and {outputs} outputs, not both multiples of {self.multiple}"
        return None


class Int8(Bits8):
    """int8 weights."""

    kind = "int8"
    layer = Int8Linear


class LlmInt8(Bits8):
    """int8 weights and products, except columns of inputs with outliers."""

    kind = "llm_int8"
    packs_experts = False
    layer = LlmInt8Linear
    multiple = 4

    def notes(self, device: str) -> list[str]:
        note = "quantization=llm_int8: on a CPU, int8 products are computed in float32, slower than quantization=int8"
        return [note] if device == "cpu" else []


class Fp8(Bits8):
    """fp8 (e4m3) weights and products."""

    kind = "fp8"
    packs_experts = False
    layer = Fp8Linear
    multiple = 16

    def missing_on(self, device: torch.device) -> str | None:
        """Return the GPU that fp8 needs; a CPU computes the same numbers in float32."""
        if device.type != "cuda":
            return None
        capability, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
        if torch.version.hip is None and capability >= _FP8_MIN_CAPABILITY:
            return None
        return (
            f"quantization.kind=fp8 needs an NVIDIA GPU of compute capability 8.9 or higher (Ada, Hopper or newer), "
            f"and this {name} has {capability[0]}.{capability[1]}. Set quantization=none, or quantization=nf4 for less "
            "memory."
        )

    def notes(self, device: str) -> list[str]:
        note = (
            "quantization=fp8: a CPU has no fp8, so products are computed in float32, slower than without quantization"
        )
        return [note] if device == "cpu" else []


class PackedQuantizer(Quantizer):
    """4-bit numbers in the layout of published models."""

    needed_by_adapter = True
    rounded = experts.packed_and_unpacked

    def stored(self, packed: PackedWeight) -> nn.Module:
        return PackedLinear(packed, None)

    def unpacked(self, layer: Any, dtype: torch.dtype) -> Tensor:
        result: Tensor = layer.unpacked(dtype)
        return result


@dataclass(frozen=True, slots=True)
class Int4(PackedQuantizer):
    """4-bit integers with a scale and a zero point for each group of inputs, as stored in GPTQ and AWQ folders."""

    kind = INT4
    packs_experts = False
    group_size: int

    def quantized(self, layer: Any) -> nn.Module:
        weight = weight_of(layer)
        group = self.group_size if self.group_size > 0 else weight.shape[1]
        packed = round_to_int4(weight, group, torch.bfloat16)
        zero = torch.zeros_like(packed.scale, dtype=torch.int8)
        return PackedLinear(replace(packed, zero=zero), layer.bias)

    def unsupported(self, name: str, outputs: int, inputs: int) -> str | None:  # noqa: ARG002
        multiple = max(2, self.group_size)  # a byte has two weights
        return f"{name} has {inputs} inputs, not a multiple of {multiple}" if inputs % multiple else None


class BlockScaled(PackedQuantizer):
    """Numbers in E2M1 with a scale per block of inputs."""

    by_outputs = True
    to_nearest: Callable[[Tensor], PackedWeight]

    def quantized(self, layer: Any) -> nn.Module:
        return PackedLinear(self.to_nearest(weight_of(layer)), layer.bias)

    def unsupported(self, name: str, outputs: int, inputs: int) -> str | None:  # noqa: ARG002
        size = GROUPS[self.kind]
        return f"{name} has {inputs} inputs, not a multiple of {size}" if inputs % size else None


class Mxfp4(BlockScaled):
    """E2M1 with a power of two per 32 inputs. In a mixture of experts only their stacks, as published by OpenAI."""

    kind = MXFP4
    to_nearest = staticmethod(round_to_mxfp4)

    def layers(self, lm: Any) -> list[str]:
        return [] if experts.stacks_of(lm) else super().layers(lm)


class Nvfp4(BlockScaled):
    """E2M1 with an E4M3 scale per 16 inputs, times a scale for the weight."""

    kind = NVFP4
    packs_experts = False
    to_nearest = staticmethod(round_to_nvfp4)


class Qat(Quantizer):
    """Quantization-aware training by torchao: plain weights, rounded in each forward pass."""

    kind = "qat"
    needed_by_adapter = False
    packs = False
    packs_experts = False

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme
        self.card = (
            f"Trained for quantization by torchao to {scheme} (groups of {_QAT_GROUP} weights); saved without "
            "rounding. Quantized this way it computes as in training; loaded as above, results differ slightly."
        )

    def config(self) -> Any:
        """Return the config with which torchao's `quantize_` quantizes the trained model."""
        from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig, PerGroup

        bits, group = torch.int4, PerGroup(_QAT_GROUP)  # type: ignore[attr-defined]
        if self.scheme == "int4":
            return IntxWeightOnlyConfig(weight_dtype=bits, granularity=group)
        return Int8DynamicActivationIntxWeightConfig(weight_dtype=bits, weight_granularity=group)

    def quantized(self, layer: Any) -> nn.Module:
        from torchao.quantization import quantize_
        from torchao.quantization.qat import QATConfig

        holder = nn.Sequential(layer)
        quantize_(holder, QATConfig(self.config(), step="prepare"))
        return holder[0]

    def constants(self, network: nn.Module) -> list[Tensor]:
        """Return the scales of the last forward pass, which torchao stores."""
        buffers = [vars(module).get(name) for module in network.modules() for name in ("scale", "zero_point")]
        return [buffer for buffer in buffers if isinstance(buffer, Tensor)]

    def rounded(self, weight: Tensor) -> Tensor:
        layer: Any = self.quantized(nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta"))
        result: Tensor = layer.weight_fake_quantizer(weight)
        return result

    def unsupported(self, name: str, outputs: int, inputs: int) -> str | None:  # noqa: ARG002
        return f"{name} has {inputs} inputs, not a multiple of {_QAT_GROUP}" if inputs % _QAT_GROUP else None

    def require_quantizable(self, config: ModelConfig, lm: Any) -> None:
        """Refuse GPT-2's layers too, which torchao does not support."""
        if find_spec("torchao") is None:
            raise ConfigError(
                "quantization=qat needs the package torchao, which is not installed: pip install torchao, or set "
                "quantization=none."
            )
        super().require_quantizable(config, lm)
        if any(map(is_conv1d, lm.modules())):
            raise ConfigError(
                f"quantization=qat: torchao rounds only nn.Linear, and a model of kind {lm.config.model_type} has "
                "Conv1D. Set quantization=none, or choose another model."
            )


QUANTIZATIONS: dict[str, Callable[[QuantizationConfig, torch.dtype], Quantizer | None]] = {
    "none": lambda _config, _compute: None,
    "nf4": lambda config, compute: Bits4("nf4", config.double_quant, compute),
    "fp4": lambda config, compute: Bits4("fp4", config.double_quant, compute),
    "int8": lambda _config, _compute: Int8(),
    "llm_int8": lambda _config, _compute: LlmInt8(),
    "fp8": lambda _config, _compute: Fp8(),
    "int4": lambda config, _compute: Int4(config.group_size),
    "mxfp4": lambda _config, _compute: Mxfp4(),
    "nvfp4": lambda _config, _compute: Nvfp4(),
    "qat": lambda config, _compute: Qat(config.scheme),
}


def quantizer_of(config: QuantizationConfig, compute: torch.dtype) -> Quantizer | None:
    """Return the quantizer of the base, None without quantization."""
    return QUANTIZATIONS[config.kind](config, compute)


def is_linear(layer: nn.Module) -> bool:
    """Return whether `layer` is a plain linear layer that a quantizer can replace."""
    return type(layer) is nn.Linear or is_conv1d(layer)


def is_conv1d(layer: nn.Module) -> bool:
    """Return whether `layer` is GPT-2's linear layer with a transposed weight."""
    return type(layer).__name__ == "Conv1D"


def weight_of(layer: Any) -> Tensor:
    """Return the weight as [out, in]; Conv1D stores it transposed."""
    weight: Tensor = layer.weight.detach()
    return weight if isinstance(layer, nn.Linear) else weight.T


def other_linear_layers(lm: Any) -> list[str]:
    """Return the names of the head and other linear layers that are not quantized."""
    replaced = set(backbone_linear_layers(lm))
    return [name for name, layer in lm.named_modules() if is_linear(layer) and name not in replaced]


def backbone_linear_layers(lm: Any) -> list[str]:
    """Return the names of the layers that a quantizer replaces."""
    read_past = layers_read_past(lm)
    linear = (name for name, layer in lm.named_modules() if is_linear(layer) and in_backbone(lm, name))
    return [name for name in linear if name not in read_past]


def quantization_after_training(config: QuantizationConfig) -> QuantizationConfig:
    """Return the quantization of the base with which the adapter is used later."""
    quantizer = quantizer_of(config, torch.float32)
    return config if quantizer is None or quantizer.needed_by_adapter else QuantizationConfig(kind="none")


def missing_hardware(config: QuantizationConfig, device: torch.device) -> str | None:
    """Return what `device` lacks for the quantization, and the fix."""
    quantizer = quantizer_of(config, torch.float32)
    return None if quantizer is None else quantizer.missing_on(device)


def require_hardware(config: QuantizationConfig, device: torch.device) -> None:
    """Refuse unsupported hardware before weights are read."""
    missing = missing_hardware(config, device)
    if missing is not None:
        raise ConfigError(missing)


# ---- quantization error


Rounding = Callable[[Tensor], Tensor]  # of groups [n, size] of float32 weights

_SCALE_BITS = 32
_OUTLIER_STDS = OUTLIER_THRESHOLD


def _symmetric(levels: float, to_level: Rounding, groups: Tensor) -> Tensor:
    """Round with the largest weight of a group at the largest number of the format."""
    scale = groups.abs().amax(1, keepdim=True).clamp_min(1e-30) / levels
    return to_level(groups / scale) * scale


def _asymmetric(levels: float, groups: Tensor) -> Tensor:
    """Round with the smallest and largest weight of a group at the first and last of 256 integers."""
    low, high = groups.aminmax(dim=1, keepdim=True)
    scale = ((high - low) / levels).clamp_min(1e-30)
    return ((groups - low) / scale).round() * scale + low


def _cast(dtype: torch.dtype, numbers: Tensor) -> Tensor:
    return numbers.to(dtype).float()


def _nearest(positive: tuple[float, ...], numbers: Tensor) -> Tensor:
    """Return the nearest of the positive numbers, their negatives and zero."""
    code = torch.tensor([-number for number in reversed(positive)] + [0.0, *positive])
    return code[torch.bucketize(numbers, (code[1:] + code[:-1]) / 2)]


def _by_bitsandbytes(kind: str, groups: Tensor) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    result: Tensor = dequantize_4bit(*quantize_4bit(groups, blocksize=groups.shape[1], quant_type=kind))
    return result


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """Bits per weight, weights per scale (0: all of a layer; -1: a row), and the rounding."""

    bits: int
    group: int
    rounded: Rounding
    numbers_of_scale: int = 1

    def dequantized(self, weight: Tensor) -> Tensor:
        """Return the weight [out, in] rounded to the format."""
        size = {0: weight.numel(), -1: weight.shape[1]}.get(self.group, self.group)
        flat = weight.flatten()
        filled = torch.nn.functional.pad(flat, (0, -len(flat) % size)).view(-1, size)
        return self.rounded(filled).flatten()[: len(flat)].view_as(weight)

    def bits_per_weight(self, weight: Tensor) -> float:
        """Return the bits per weight including the float32 scales."""
        size = {0: weight.numel(), -1: weight.shape[1]}.get(self.group, self.group)
        return self.bits + _SCALE_BITS * self.numbers_of_scale / size


_INT8 = partial(_symmetric, 127, torch.round)
_E2M1 = partial(_symmetric, 6, partial(_nearest, (0.5, 1, 1.5, 2, 3, 4, 6)))
_E3M0 = partial(_symmetric, 16, partial(_nearest, (0.25, 0.5, 1, 2, 4, 8, 16)))
NUMBER_FORMATS: dict[str, NumberFormat] = {
    "int8, a scale for the layer": NumberFormat(8, 0, _INT8),
    "int8, for a row": NumberFormat(8, -1, _INT8),
    "int8, for 64 weights": NumberFormat(8, 64, _INT8),
    "int8, for a row, asymmetric": NumberFormat(8, -1, partial(_asymmetric, 255), 2),
    "E4M3, for a row": NumberFormat(8, -1, partial(_symmetric, 448, partial(_cast, torch.float8_e4m3fn))),
    "E5M2, for a row": NumberFormat(8, -1, partial(_symmetric, 57344, partial(_cast, torch.float8_e5m2))),
    **{f"NF4, for {size} weights": NumberFormat(4, size, partial(_by_bitsandbytes, "nf4")) for size in (64, 128, 256)},
    **{f"FP4, for {size} weights": NumberFormat(4, size, partial(_by_bitsandbytes, "fp4")) for size in (64, 128, 256)},
    "E2M1, for 64 weights": NumberFormat(4, 64, _E2M1),
    "E3M0, for 64 weights": NumberFormat(4, 64, _E3M0),
}


def quantization_errors(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    """Return the relative error of each format, over all layers and per layer, by norms."""
    layers = list(_layers(weights))
    total = sum(layer["squares"] for layer in layers) or 1.0
    count = sum(layer["weights"] for layer in layers)
    formats = [
        {
            "format": name,
            "error": (sum(layer["errors"][name] ** 2 * layer["squares"] for layer in layers) / total) ** 0.5,
            "bits_per_weight": sum(layer["bits"][name] * layer["weights"] for layer in layers) / count,
        }
        for name in NUMBER_FORMATS
    ]
    return {
        "weights": count,
        "formats": formats,
        "layers": [{key: layer[key] for key in layer if key not in {"squares", "bits"}} for layer in layers],
    }


@torch.no_grad()
def _layers(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Any]]:
    for name, weight in weights:
        norm, std = float(weight.norm()) or 1.0, float(weight.std()) or 1.0
        size = weight.abs()
        yield {
            "layer": name,
            "weights": weight.numel(),
            "outlier_share": float((size > _OUTLIER_STDS * std).float().mean()),
            "largest_in_stds": float(size.max()) / std,
            "errors": {
                key: float((form.dequantized(weight) - weight).norm()) / norm for key, form in NUMBER_FORMATS.items()
            },
            "bits": {key: form.bits_per_weight(weight) for key, form in NUMBER_FORMATS.items()},
            "squares": norm**2,
        }
