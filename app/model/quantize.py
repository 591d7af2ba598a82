"""The frozen base in fewer bits: other layers in place of the backbone's linear ones; head and embeddings stay."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from app.config.schema import ModelConfig, PrecisionConfig, QuantizationConfig
from app.errors import ConfigError
from app.model.head import is_of_backbone
from app.model.packing import POOLER, Packing, is_linear, sizes, weight_of

# As it is imported on a CPU with avx512_bf16, it looks for a kernel that nothing here uses, and tells of its absence.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

# Weights that share a scale. Where a row does not end with a block, bitsandbytes takes the wrong scales for the rest
# on CPUs with AVX-512: the weights come back four times as far off as they should, without an error.
_BLOCK = 64
_SCALES_BLOCK = 256  # scales that share one in turn
_CPU_PIECE = 1 << 20  # weights


@dataclass(frozen=True, slots=True)
class FourBit(Packing):
    """By bitsandbytes, and what it is told."""

    kind = "nf4"
    goes_with_adapter = True  # it has learnt to make up for the rounding of these very weights

    quant_type: str
    double_quant: bool
    compute: torch.dtype

    def for_transformers(self, outside: list[str]) -> Any:
        """`outside` is left alone."""
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(**self.bitsandbytes(outside))

    def bitsandbytes(self, outside: list[str]) -> dict[str, Any]:
        """Dtypes by their names, as transformers takes them."""
        return {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": self.quant_type,
            "bnb_4bit_use_double_quant": self.double_quant,
            "bnb_4bit_compute_dtype": str(self.compute).removeprefix("torch."),
            "llm_int8_skip_modules": outside,
        }

    def unpacked(self, weight: Tensor) -> Tensor:
        """As the packed layer computes with it."""
        from bitsandbytes.functional import dequantize_4bit

        rows, columns = weight.shape
        layer = nn.Linear(columns, rows, bias=False, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        packed: Any = self.packed(layer).weight
        result: Tensor = dequantize_4bit(packed.data, packed.quant_state)
        return result

    def packed(self, layer: Any) -> nn.Module:
        """Of bitsandbytes' own class."""
        from bitsandbytes.nn import Linear4bit, Params4bit

        weight = weight_of(layer)
        packed = Linear4bit(
            weight.shape[1],
            weight.shape[0],
            bias=layer.bias is not None,
            compute_dtype=self.compute,
            compress_statistics=self.double_quant,
            quant_type=self.quant_type,
            device="meta",
        )
        as_made = {key: value for key, value in packed.weight.__dict__.items() if key != "data"}
        data = weight.contiguous()
        if not weight.is_meta:  # there it stays what it is, as bitsandbytes leaves it
            data, packed.quant_state = self._quantized(data)
            as_made |= {"quant_state": packed.quant_state, "bnb_quantized": True, "module": packed}
        packed.weight = Params4bit(data, requires_grad=False, **as_made)
        packed.weight._is_hf_initialized = True  # a parent's initialisation must not draw over the bytes
        packed.bias = layer.bias
        result: nn.Module = packed.requires_grad_(False)
        return result

    def unfit(self, name: str, outputs: int, inputs: int) -> str | None:  # noqa: ARG002
        """A row must end with a block."""
        return f"{name} has {inputs} inputs, not a multiple of {_BLOCK}" if inputs % _BLOCK else None

    def settle(self, lm: Any) -> None:
        """Say so to PEFT, and keep the bytes as they are.

        On CPUs with avx512_bf16 the first evaluation would rearrange every weight in place: the next step would compute
        with other numbers, and a continued run with others again.
        """
        from bitsandbytes.nn import Linear4bit

        lm.is_loaded_in_4bit = True
        for layer in lm.modules():
            if isinstance(layer, Linear4bit) and hasattr(layer, "support_avx512bf16_for_cpu"):
                layer.support_avx512bf16_for_cpu = False

    def _quantized(self, weight: Tensor) -> tuple[Tensor, Any]:
        """As bitsandbytes packs it, to the last bit. On a CPU it makes six copies on the way, so it gets pieces."""
        from bitsandbytes.functional import QuantState, quantize_4bit, quantize_blockwise

        limit = _CPU_PIECE if weight.device.type == "cpu" else weight.numel()
        pieces = [
            quantize_4bit(rows, blocksize=_BLOCK, compress_statistics=False, quant_type=self.quant_type)
            for rows in weight.split(max(limit // weight.shape[1], 1))
        ]
        data, scales = (
            torch.cat([packed for packed, _ in pieces]),
            torch.cat([state.absmax for _, state in pieces]),
        )
        known: dict[str, Any] = {"absmax": scales}
        if self.double_quant:
            offset = scales.mean()
            absmax, second = quantize_blockwise(scales - offset, blocksize=_SCALES_BLOCK)
            known = {"absmax": absmax, "offset": offset, "state2": second}
        first = pieces[0][1]
        state = QuantState(
            shape=weight.shape,
            dtype=weight.dtype,
            blocksize=_BLOCK,
            code=first.code,
            quant_type=self.quant_type,
            **known,
        )
        return data, state


def _none(_config: QuantizationConfig, _compute: torch.dtype) -> None:
    return None


def _nf4(config: QuantizationConfig, compute: torch.dtype) -> FourBit:
    return FourBit("nf4", config.double_quant, compute)


def _fp8(_config: QuantizationConfig, _compute: torch.dtype) -> Packing:
    from app.model.fp8 import EightBit

    return EightBit()


QUANTIZATIONS: dict[str, Callable[[QuantizationConfig, torch.dtype], Packing | None]] = {
    "none": _none,
    "nf4": _nf4,
    "fp8": _fp8,
}


def packing_of(config: QuantizationConfig, compute: torch.dtype) -> Packing | None:
    """How the base is packed, None when it is not."""
    return QUANTIZATIONS[config.kind](config, compute)


def linear_outside(lm: Any) -> list[str]:
    """The head, and whatever else is linear beside the backbone."""
    linear = [name for name, layer in lm.named_modules() if is_linear(layer)]
    return [name for name in linear if not is_of_backbone(lm, name)]


def linear_inside(lm: Any) -> list[str]:
    """What `pack` packs of an unpacked model."""
    linear = [name for name, layer in lm.named_modules() if is_linear(layer)]
    return [name for name in linear if is_of_backbone(lm, name)]


def settle(lm: Any, packing: Packing) -> None:
    """After packing: nothing is left."""
    packing.settle(lm)
    left = linear_inside(lm)
    assert not left, f"not quantised: {left}"


def lasting(config: QuantizationConfig) -> QuantizationConfig:
    """How the base is held by whoever uses the adapter after training."""
    packing = packing_of(config, torch.float32)
    return config if packing is None or packing.goes_with_adapter else QuantizationConfig(kind="none")


def require_quantizable(given: ModelConfig, lm: Any, packing: Packing) -> None:
    """Refuse by name what would stay large, or come out wrong; `lm` may be on meta."""
    kind = lm.config.model_type

    def refuse(reason: str) -> None:
        source = "model.architecture" if given.weights == "random" else f"model.path={given.path}"
        raise ConfigError(
            f"quantization.kind={packing.kind}: a model of kind {kind} ({source}) cannot be quantised here: {reason}. "
            "Set recipe=lora or quantization=none, or choose another model."
        )

    if getattr(lm.config, "quantization_config", None) is not None:
        refuse("these weights are quantised already")
    if any(".experts." in f".{name}" for name, _ in lm.base_model.named_parameters()):
        refuse("its experts are stacked, and stacked weights are not quantised yet")
    for name, layer in lm.base_model.named_modules():
        if is_linear(layer) and not name.startswith(POOLER):
            reason = packing.unfit(name, *sizes(layer))
            if reason is not None:
                refuse(reason)


def lack_of_machine(config: QuantizationConfig, device: torch.device) -> str | None:
    """What a device lacks for it, and what to do."""
    packing = packing_of(config, torch.float32)
    return None if packing is None else packing.missing(device)


def require_machine(config: QuantizationConfig, device: torch.device) -> None:
    """Told before any weight is read."""
    lack = lack_of_machine(config, device)
    if lack is not None:
        raise ConfigError(lack)


def notes(config: QuantizationConfig, precision: PrecisionConfig, chosen: str, device: str) -> list[str]:
    """What is true of a quantised run on this machine and that its recipe does not say."""
    if config.kind == "none":
        return []
    found = []
    if precision.kind == "auto" and chosen != "bf16":
        found.append(
            f"quantization={config.kind}: this {device.upper()} has no bf16 instructions, so precision=auto means "
            f"{chosen}; what is not quantised is stored and computed in {chosen}"
        )
    packing = packing_of(config, torch.float32)
    slow = None if packing is None else packing.slow_on(device)
    return [*found, slow] if slow is not None else found
