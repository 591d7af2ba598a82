"""NF4 and FP4 by bitsandbytes: quantised layers and their forward, and dequantising into one shared buffer."""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from app.model.kernels import on_gpu
from app.model.operations import COSTS, OperationCost, Size

# Imported on a CPU with avx512_bf16, bitsandbytes looks for a kernel that nothing here uses, and logs its absence.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

# Weights that share a scale. Where a row does not end with a block, bitsandbytes takes the wrong scales for the rest
# on CPUs with AVX-512: the weights come back four times as far off as they should, without an error.
BLOCK = 64
MAX_NUMBERS = 2**31 - 1  # of a weight or stack: its GPU kernels count in 32 bits, and wrap round without an error
_FEW_ROWS = 4  # that bitsandbytes multiplies on every GPU without dequantising the weight: those of an answer
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
    layer.weight._is_hf_initialized = True  # a parent's initialisation must not draw over the bytes
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
    """Forward with the quantisation state that the layer holds: bitsandbytes' own makes a parameter of a weight that
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


# One operation, so that the memory plan, on tensors without memory, counts what it takes on a GPU: nothing new
_OPS = torch.library.Library("app_kernels", "FRAGMENT")
_OPS.define("dequantize_4bit(Tensor data, Tensor scales, int blocksize, str kind, Tensor(a!) out) -> ()")


def _dequantize_on_cpu(data: Tensor, scales: Tensor, blocksize: int, kind: str, out: Tensor) -> None:
    """Used by tests alone: bitsandbytes has no such kernel for a CPU."""
    from bitsandbytes.functional import QuantState, dequantize_4bit

    state = QuantState(scales, shape=out.shape, blocksize=blocksize, quant_type=kind, dtype=out.dtype)
    out.copy_(dequantize_4bit(data, state))


def _dequantize_on_gpu(data: Tensor, scales: Tensor, blocksize: int, kind: str, out: Tensor) -> None:
    from bitsandbytes.functional import dequantize_4bit

    dequantize_4bit(data, absmax=scales, out=out, blocksize=blocksize, quant_type=kind)


_OPS.impl("dequantize_4bit", _dequantize_on_cpu, "CPU")
_OPS.impl("dequantize_4bit", _dequantize_on_gpu, "CUDA")
torch.library.register_fake("app_kernels::dequantize_4bit", lambda *_given: None, lib=_OPS)


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


COSTS["app_kernels::dequantize_4bit"] = OperationCost()
COSTS["bitsandbytes::gemm_4bit"] = OperationCost(_product_flops, _product_bytes, _product_bytes)


class DequantizeBuffer:
    """One buffer as large as the largest weight. Its contents are valid until the next weight is dequantised, so no
    product may save it for its backward pass.
    """

    def __init__(self, layers: Iterable[Any]) -> None:
        self._max_weights = max(layer.in_features * layer.out_features for layer in layers)
        self._buffers: dict[torch.dtype, Tensor] = {}

    def dequantized(self, layer: Any, dtype: torch.dtype) -> Tensor:
        """The weight [out, in] of a 4-bit layer."""
        from bitsandbytes.functional import dequantize_blockwise

        state, data = layer.quant_state, layer.weight.data
        if dtype not in self._buffers:
            self._buffers[dtype] = torch.empty(self._max_weights, dtype=dtype, device=data.device)
        out = self._buffers[dtype][: state.shape.numel()].view(state.shape)
        scales = state.absmax
        if state.nested:
            scales = dequantize_blockwise(scales, state.state2).add_(state.offset)
        torch.ops.app_kernels.dequantize_4bit(data, scales, state.blocksize, state.quant_type, out)
        return out


@dataclass(frozen=True, slots=True)
class FourBits:
    """A frozen 4-bit layer in a fused pass; with a buffer, as on GPUs, each product dequantises into it.

    A compiled graph frees a weight after its product by itself, and would save the buffer for its backward pass.
    """

    layer: Any
    buffer: DequantizeBuffer | None

    def prepared(self, rows: Tensor) -> Tensor:
        return rows

    def product(self, rows: Tensor) -> Tensor:
        if self.buffer is None or torch.compiler.is_compiling() or len(rows) <= _FEW_ROWS:
            result: Tensor = self.layer(rows)
            return result
        bias = None if self.layer.bias is None else self.layer.bias.to(rows.dtype)
        return F.linear(rows, self.buffer.dequantized(self.layer, rows.dtype), bias)

    def back(self, gradient: Tensor) -> Tensor:
        if self.buffer is None or torch.compiler.is_compiling():
            return gradient @ dequantized(self.layer).to(gradient.dtype)
        return gradient @ self.buffer.dequantized(self.layer, gradient.dtype)


def constants(network: nn.Module) -> list[Tensor]:
    """Scales, their scales and tables of the 4-bit layers inside `network`."""
    found: list[Tensor] = []
    for layer in network.modules():
        state: Any = getattr(layer, "quant_state", None)
        while state is not None:
            found += [each for each in (state.absmax, state.code, state.offset) if isinstance(each, Tensor)]
            state = state.state2
    return found


def fused_forms(network: nn.Module) -> dict[nn.Module, FourBits]:
    """The 4-bit layers inside `network`; on a GPU they share one buffer."""
    from bitsandbytes.nn import Linear4bit

    layers = [m for m in network.modules() if isinstance(m, Linear4bit) and not hasattr(m, "stack")]  # no experts
    buffer = DequantizeBuffer(layers) if layers and on_gpu(layers[0].weight.device) else None
    return {layer: FourBits(layer, buffer) for layer in layers}
