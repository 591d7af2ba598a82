"""NF4 and FP4 by bitsandbytes: quantized layers and their forward."""

import logging
import math
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from app.layers.operations import COSTS, OperationCost, Size

# On a CPU with avx512_bf16, importing bitsandbytes logs the absence of a kernel that is not used here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

# Weights per scale. If a row does not end with a block, bitsandbytes uses the wrong scales for the rest on CPUs with
# AVX-512: the quantization error is four times as large, without a message.
BLOCK = 64
MAX_NUMBERS = 2**31 - 1  # in a weight or stack: its GPU kernels index with 32 bits, and overflow without an error
_DOUBLE_QUANT_BLOCK = 256  # scales per second-level scale
_DOUBLE_QUANT_BLOCK_BYTES = 8  # the original scales, and a copy with the offset


def linear_4bit(weight: Tensor, bias: Any, kind: str, *, double_quant: bool, compute: torch.dtype) -> nn.Module:
    """Return a frozen layer of bitsandbytes' own class; on meta its weight keeps its shape, as in bitsandbytes.

    A weight quantized by bitsandbytes is used unchanged.
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
    layer.weight._is_hf_initialized = True  # a parent's initialization must not overwrite the bytes
    layer.bias = bias
    result: nn.Module = layer.requires_grad_(False)
    return result


def install_forward(lm: nn.Module) -> None:
    """Use `_forward_4bit` in all 4-bit layers."""
    from bitsandbytes.nn import Linear4bit

    for layer in lm.modules():
        if isinstance(layer, Linear4bit):
            layer.forward = MethodType(_forward_4bit, layer)


def use_stored_shapes(network: nn.Module) -> None:
    """Replace 4-bit weights on meta by plain byte parameters, two weights per byte, as FSDP gathers them."""
    from bitsandbytes.nn import Linear4bit

    for layer in network.modules():
        if isinstance(layer, Linear4bit):  # PEFT's class of the same name contains one
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
    """Forward with the quantization state of the layer: bitsandbytes' own turns a weight gathered by FSDP into a
    parameter. On CPUs with avx512_bf16 it also rearranges every weight in place at the first evaluation: the next step
    would compute with other numbers, and a resumed run with others again.
    """
    import bitsandbytes

    rows = x.to(self.compute_dtype or x.dtype)
    bias = None if self.bias is None else self.bias.to(rows.dtype)
    out: Tensor = bitsandbytes.matmul_4bit(rows, self.weight, bias=bias, quant_state=self.quant_state)
    return out.to(x.dtype)


def dequantized(layer: Any) -> Tensor:
    """Return the dequantized weight [out, in] of a 4-bit layer, in its original dtype."""
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
    """Return the bytes of the whole dequantized weight, which bitsandbytes multiplies by the rows of training."""
    count = shape[0] * shape[1]
    scales = 0 if absmax_8bit is None else -(-count // block) * _DOUBLE_QUANT_BLOCK_BYTES
    return count * rows.element_size() + scales


COSTS["bitsandbytes::gemm_4bit"] = OperationCost(_product_flops, _product_bytes, _product_bytes)


def constants(network: nn.Module) -> list[Tensor]:
    """Return scales, second-level scales and code tables of the 4-bit layers inside `network`."""
    tensors: list[Tensor] = []
    for layer in network.modules():
        state: Any = getattr(layer, "quant_state", None)
        while state is not None:
            tensors += [tensor for tensor in (state.absmax, state.code, state.offset) if isinstance(tensor, Tensor)]
            state = state.state2
    return tensors
