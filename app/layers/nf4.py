"""NF4 and FP4 by bitsandbytes: quantized layers and their forward."""

import logging
import math
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from app.layers.operations import COSTS, OperationCost, Size

# Imported on a CPU with avx512_bf16, bitsandbytes looks for a kernel that nothing here uses, and logs its absence.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

# Weights that share a scale. Where a row does not end with a block, bitsandbytes takes the wrong scales for the rest
# on CPUs with AVX-512: the weights come back four times as far off as they should, without an error.
BLOCK = 64
MAX_NUMBERS = 2**31 - 1  # of a weight or stack: its GPU kernels count in 32 bits, and wrap round without an error
_DOUBLE_QUANT_BLOCK = 256  # scales per second-level scale
_DOUBLE_QUANT_BLOCK_BYTES = 8  # the scales as they were, and once more with their offset


def linear_4bit(weight: Tensor, bias: Any, kind: str, *, double_quant: bool, compute: torch.dtype) -> nn.Module:
    """A frozen layer of bitsandbytes' own class; on meta its weight keeps its shape, as bitsandbytes leaves it.

    A weight of bitsandbytes is used as it is.
    """
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn import Linear4bit, Params4bit

    packed = getattr(weight, "quant_state", None)
    outputs, inputs = weight.shape if packed is None else packed.shape
    layer = Linear4bit(
        inputs,
        outputs,
        bias=bias is not None,
        compute_dtype=compute,
        compress_statistics=double_quant,
        quant_type=kind,
        device="meta",
    )
    attributes = {key: value for key, value in layer.weight.__dict__.items() if key != "data"}
    data = weight.contiguous()
    if packed is not None:
        data, layer.quant_state = weight.data.view(torch.uint8).view(-1, 1), packed
    elif not weight.is_meta:
        data, layer.quant_state = quantize_4bit(
            data, blocksize=BLOCK, compress_statistics=double_quant, quant_type=kind
        )
    if layer.quant_state is not None:
        attributes |= {"quant_state": layer.quant_state, "bnb_quantized": True, "module": layer}
    layer.weight = Params4bit(data, requires_grad=False, **attributes)
    layer.weight._is_hf_initialized = True  # a parent's initialization must not draw over the bytes
    layer.bias = bias
    result: nn.Module = layer.requires_grad_(False)
    return result


def install_forward(lm: nn.Module) -> None:
    """Let all 4-bit layers compute by `_forward_4bit`."""
    from bitsandbytes.nn import Linear4bit

    for layer in lm.modules():
        if isinstance(layer, Linear4bit):
            layer.forward = MethodType(_forward_4bit, layer)


def use_stored_shapes(network: nn.Module) -> None:
    """On meta: 4-bit weights two a byte, in plain parameters, as FSDP gathers them. The state is the layer's."""
    from bitsandbytes.nn import Linear4bit

    for layer in network.modules():
        if isinstance(layer, Linear4bit):  # PEFT's class of the same name has it inside
            bytes_ = torch.empty((layer.weight.numel() // 2, 1), dtype=torch.uint8, device="meta")
            layer.weight = nn.Parameter(bytes_, requires_grad=False)


def fake(layer: Any) -> None:
    """Replace a 4-bit weight on meta by its bytes: `Params4bit` of bitsandbytes cannot be built from fake tensors."""
    from bitsandbytes.functional import QuantState

    weight = layer._parameters.get("weight")
    if not hasattr(weight, "quant_type"):
        return
    blocks, double = -(-weight.numel() // weight.blocksize), weight.compress_statistics
    state: dict[str, Any] = {
        "absmax": torch.empty(blocks, dtype=torch.uint8 if double else torch.float32),
        "shape": torch.Size((layer.out_features, layer.in_features)),
        "dtype": weight.dtype,
        "blocksize": weight.blocksize,
        "code": torch.empty(16),
        "quant_type": weight.quant_type,
    }
    if double:
        scales = torch.empty(-(-blocks // _DOUBLE_QUANT_BLOCK))
        state |= {
            "offset": torch.empty(()),
            "state2": QuantState(scales, blocksize=_DOUBLE_QUANT_BLOCK, code=torch.empty(256), dtype=torch.float32),
        }
    data: Any = nn.Parameter(torch.empty(((weight.numel() + 1) // 2, 1), dtype=torch.uint8), requires_grad=False)
    layer.quant_state = data.quant_state = QuantState(**state)
    layer._parameters["weight"] = data


def _forward_4bit(self: Any, x: Tensor) -> Tensor:
    """Forward with the quantization state that the layer holds: bitsandbytes' own makes a parameter of a weight that
    FSDP gathered. On CPUs with avx512_bf16 that also rearranges every weight in place at the first evaluation: the next
    step would compute with other numbers, and a continued run with others again.
    """
    import bitsandbytes

    rows = x.to(self.compute_dtype or x.dtype)
    bias = None if self.bias is None else self.bias.to(rows.dtype)
    out: Tensor = bitsandbytes.matmul_4bit(rows, self.weight, bias=bias, quant_state=self.quant_state)
    return out.to(x.dtype)


def dequantized(layer: Any) -> Tensor:
    """The weight [out, in] of a 4-bit layer, in the dtype that it had."""
    from bitsandbytes.functional import dequantize_4bit

    result: Tensor = dequantize_4bit(layer.weight.data, layer.quant_state)
    return result


def _product_flops(rows: Size, _packed: Size, shape: Size, *_args: Any, **_kwargs: Any) -> int:
    return 2 * math.prod(rows[:-1]) * shape[0] * shape[1]


def _product_bytes(
    rows: Tensor,
    _packed: Tensor,
    shape: list[int],
    _scales: Tensor,
    block: int,
    _kind: str,
    bias: Tensor | None = None,  # noqa: ARG001
    absmax_8bit: Tensor | None = None,
    *_more: Any,
    **_named: Any,
) -> int:
    """bitsandbytes dequantizes the whole weight before it multiplies by as many rows as training has."""
    count = shape[0] * shape[1]
    scales = 0 if absmax_8bit is None else -(-count // block) * _DOUBLE_QUANT_BLOCK_BYTES
    return count * rows.element_size() + scales


COSTS["bitsandbytes::gemm_4bit"] = OperationCost(_product_flops, _product_bytes, _product_bytes)


def constants(network: nn.Module) -> list[Tensor]:
    """Scales, their scales and tables of the 4-bit layers inside `network`."""
    found: list[Tensor] = []
    for layer in network.modules():
        state: Any = getattr(layer, "quant_state", None)
        while state is not None:
            found += [each for each in (state.absmax, state.code, state.offset) if isinstance(each, Tensor)]
            state = state.state2
    return found
