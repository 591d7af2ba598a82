"""The frozen base in fewer bits: other layers in place of the backbone's linear ones; head and embeddings stay.

The table of kinds, and NF4 by bitsandbytes; `quantization=fp8` is in `model.fp8_linear`.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from app.config.schema import ModelConfig, PrecisionConfig, QuantizationConfig
from app.errors import ConfigError
from app.model.head import is_of_backbone

# As it is imported on a CPU with avx512_bf16, it looks for a kernel that nothing here uses, and tells of its absence.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

POOLER = "pooler."  # of a backbone; it belongs to the head, which stays as it is

# Weights that share a scale. Where a row does not end with a block, bitsandbytes takes the wrong scales for the rest
# on CPUs with AVX-512: the weights come back four times as far off as they should, without an error.
_BLOCK = 64
_SCALES_BLOCK = 256  # scales that share one in turn
_CPU_PIECE = 1 << 20  # weights


class Packing(ABC):
    """One way. Whoever builds, loads or plans a model asks this, and knows no kind by name."""

    kind: str  # as quantization.kind has it
    # whether the adapter is worth less on a base that is not packed: then whoever uses it later packs alike
    goes_with_adapter: bool

    def pack(self, part: nn.Module) -> None:
        """Every plain linear layer inside `part`, in place; the unpacked weights are let go one by one."""
        for name, layer in list(part.named_modules()):
            if is_linear(layer) and not name.startswith(POOLER):
                self.pack_one(part, name)

    def pack_one(self, part: nn.Module, name: str) -> None:
        """The same for the layer of this name."""
        part.set_submodule(name, self.packed(part.get_submodule(name)))

    @abstractmethod
    def packed(self, layer: Any) -> nn.Module:
        """What takes the place of a plain linear layer, frozen."""

    @abstractmethod
    def unpacked(self, weight: Tensor) -> Tensor:
        """A linear layer's weight [out, in] as the packed layer has it, in the dtype that it came in."""

    @abstractmethod
    def unfit(self, name: str, outputs: int, inputs: int) -> str | None:
        """Why a layer of these sizes cannot be packed."""

    def missing(self, device: torch.device) -> str | None:  # noqa: ARG002
        """What this device lacks to compute with packed layers, and what to do; None: nothing."""
        return None

    def slow_on(self, device: str) -> str | None:  # noqa: ARG002
        """A note, where it is only good for trying out."""
        return None

    def for_transformers(self, outside: list[str]) -> Any | None:  # noqa: ARG002
        """What from_pretrained is told to pack each weight as it is read; None: it cannot."""
        return None

    def bitsandbytes(self, outside: list[str]) -> dict[str, Any] | None:  # noqa: ARG002
        """The same as plain arguments of BitsAndBytesConfig, for whoever loads the base elsewhere; None: as it is."""
        return None

    def settle(self, lm: Any) -> None:  # noqa: ARG002
        """After all of it was packed."""
        return


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
        rows, columns = weight.shape
        layer = nn.Linear(columns, rows, bias=False, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        return dequantized(self.packed(layer))

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
        """Say so to PEFT, and let layers compute by `_forward_4bit`."""
        from bitsandbytes.nn import Linear4bit

        lm.is_loaded_in_4bit = True
        for layer in lm.modules():
            if isinstance(layer, Linear4bit):
                layer.forward = MethodType(_forward_4bit, layer)

    def _quantized(self, weight: Tensor) -> tuple[Tensor, Any]:
        """As bitsandbytes packs it, to the last bit. On a CPU it makes six copies on the way, so it gets pieces."""
        from bitsandbytes.functional import QuantState, quantize_4bit, quantize_blockwise

        limit = _CPU_PIECE if weight.device.type == "cpu" else weight.numel()
        pieces = [
            quantize_4bit(rows, blocksize=_BLOCK, compress_statistics=False, quant_type=self.quant_type)
            for rows in weight.split(max(limit // weight.shape[1], 1))
        ]
        data = torch.cat([packed for packed, _ in pieces])
        scales = torch.cat([state.absmax for _, state in pieces])
        known: dict[str, Any] = {"absmax": scales}
        if self.double_quant:
            offset = scales.mean()
            absmax, second = quantize_blockwise(scales - offset, blocksize=_SCALES_BLOCK)
            known = {"absmax": absmax, "offset": offset, "state2": second}
        state = QuantState(
            shape=weight.shape,
            dtype=weight.dtype,
            blocksize=_BLOCK,
            code=pieces[0][1].code,
            quant_type=self.quant_type,
            **known,
        )
        return data, state


def _forward_4bit(self: Any, x: Tensor) -> Tensor:
    """Of a packed layer, with the state that the layer holds: bitsandbytes' own makes a parameter of a weight that FSDP
    gathered. On CPUs with avx512_bf16 that also rearranges every weight in place at the first evaluation: the next step
    would compute with other numbers, and a continued run with others again.
    """
    import bitsandbytes

    rows = x.to(self.compute_dtype or x.dtype)
    bias = None if self.bias is None else self.bias.to(rows.dtype)
    out: Tensor = bitsandbytes.matmul_4bit(rows, self.weight, bias=bias, quant_state=self.quant_state)
    return out.to(x.dtype)


def dequantized(layer: Any) -> Tensor:
    """The weight [out, in] of a packed layer, in the dtype that it had."""
    from bitsandbytes.functional import dequantize_4bit

    result: Tensor = dequantize_4bit(layer.weight.data, layer.quant_state)
    return result


# One operation, so that a plan on tensors without memory sees what bitsandbytes' own sees on a GPU: nothing new
_OPS = torch.library.Library("app_kernels", "FRAGMENT")
_OPS.define("dequantize_4bit(Tensor data, Tensor scales, int blocksize, str kind, Tensor(a!) out) -> ()")


def _dequantize_on_cpu(data: Tensor, scales: Tensor, blocksize: int, kind: str, out: Tensor) -> None:
    """bitsandbytes has no such kernel for a CPU, which comes here in tests alone."""
    from bitsandbytes.functional import QuantState, dequantize_4bit

    state = QuantState(scales, shape=out.shape, blocksize=blocksize, quant_type=kind, dtype=out.dtype)
    out.copy_(dequantize_4bit(data, state))


def _dequantize_on_gpu(data: Tensor, scales: Tensor, blocksize: int, kind: str, out: Tensor) -> None:
    from bitsandbytes.functional import dequantize_4bit

    dequantize_4bit(data, absmax=scales, out=out, blocksize=blocksize, quant_type=kind)


_OPS.impl("dequantize_4bit", _dequantize_on_cpu, "CPU")
_OPS.impl("dequantize_4bit", _dequantize_on_gpu, "CUDA")
torch.library.register_fake("app_kernels::dequantize_4bit", lambda *_given: None, lib=_OPS)


class DequantizeBuffer:
    """Memory for one weight, as large as the largest; what is in it holds until the next is dequantised.

    So a product must not keep it for its backward pass.
    """

    def __init__(self, layers: Iterable[Any]) -> None:
        self._largest = max(layer.in_features * layer.out_features for layer in layers)
        self._buffers: dict[torch.dtype, Tensor] = {}

    def dequantized(self, layer: Any, dtype: torch.dtype) -> Tensor:
        """The weight [out, in] of a packed layer, until the next."""
        from bitsandbytes.functional import dequantize_blockwise

        state, data = layer.quant_state, layer.weight.data
        if dtype not in self._buffers:
            self._buffers[dtype] = torch.empty(self._largest, dtype=dtype, device=data.device)
        out = self._buffers[dtype][: state.shape.numel()].view(state.shape)
        scales = state.absmax
        if state.nested:
            scales = dequantize_blockwise(scales, state.state2).add_(state.offset)
        torch.ops.app_kernels.dequantize_4bit(data, scales, state.blocksize, state.quant_type, out)
        return out


def _nf4(config: QuantizationConfig, compute: torch.dtype) -> FourBit:
    return FourBit("nf4", config.double_quant, compute)


def _fp8(_config: QuantizationConfig, _compute: torch.dtype) -> Packing:
    from app.model.fp8_linear import EightBit

    return EightBit()


QUANTIZATIONS: dict[str, Callable[[QuantizationConfig, torch.dtype], Packing | None]] = {
    "none": lambda _config, _compute: None,
    "nf4": _nf4,
    "fp8": _fp8,
}


def packing_of(config: QuantizationConfig, compute: torch.dtype) -> Packing | None:
    """How the base is packed, None when it is not."""
    return QUANTIZATIONS[config.kind](config, compute)


def is_linear(layer: nn.Module) -> bool:
    """Of those that are replaced, not replaced yet."""
    return type(layer) is nn.Linear or type(layer).__name__ == "Conv1D"


def weight_of(layer: Any) -> Tensor:
    """[out, in]; Conv1D has it transposed."""
    weight: Tensor = layer.weight.detach()
    return weight if isinstance(layer, nn.Linear) else weight.T


def constants_of(weight: Any) -> Iterator[Tensor]:
    """What a packed weight needs to be unpacked, where it is no part of its layer."""
    state = getattr(weight, "quant_state", None)
    while state is not None:
        yield from (each for each in (state.absmax, state.code, state.offset) if isinstance(each, Tensor))
        state = state.state2


def linear_outside(lm: Any) -> list[str]:
    """The head, and whatever else is linear beside the backbone."""
    return [name for name in _linear(lm) if not is_of_backbone(lm, name)]


def linear_inside(lm: Any) -> list[str]:
    """What `pack` packs of an unpacked model."""
    return [name for name in _linear(lm) if is_of_backbone(lm, name)]


def _linear(lm: Any) -> list[str]:
    return [name for name, layer in lm.named_modules() if is_linear(layer)]


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
            outputs, inputs = weight_of(layer).shape
            reason = packing.unfit(name, outputs, inputs)
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
    packing = packing_of(config, torch.float32)
    if packing is None:
        return []
    found = []
    if precision.kind == "auto" and chosen != "bf16":
        found.append(
            f"quantization={config.kind}: this {device.upper()} has no bf16 instructions, so precision=auto means "
            f"{chosen}; what is not quantised is stored and computed in {chosen}"
        )
    slow = packing.slow_on(device)
    return [*found, slow] if slow is not None else found
