"""Frozen linear layers in int8, with rows in the compute dtype or rounded too (LLM.int8), and in fp8 (e4m3).

An fp8 weight is stored twice, with a scale per row: [out, in] for forward and [in, out] for the gradient of the rows,
because an fp8 product needs the summed dimension contiguous. Together they take as much as bf16. Rows are rounded for
each product, with a scale per row. Without fp8 hardware the same numbers are multiplied in float32.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from app.layers.comparison import Comparison, Fault, attempt, max_difference
from app.layers.operations import COSTS, OperationCost, Size, autocast_dtype, can_run

_INT8_MAX = 127
OUTLIER_THRESHOLD = 6.0  # of LLM.int8: columns of layer inputs with a value of at least this size are not rounded


class FrozenLinear(nn.Linear, ABC):
    """A linear layer with a gradient only for its rows. Rows of `product` and `back` are in the compute dtype."""

    def __init__(self, weight: Tensor, bias: nn.Parameter | None) -> None:
        """Store the bias and the sizes of `weight` [out, in]; subclasses store the weight."""
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.register_parameter("bias", bias)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Linear.apply(x, self)  # type: ignore[no-untyped-call]
        return result

    @abstractmethod
    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight [out, in]."""

    @abstractmethod
    def product(self, rows: Tensor) -> Tensor:
        """Return the output for rows [n, in]."""

    @abstractmethod
    def back(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the rows from that of the output."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FrozenLinear) -> Tensor:
        dtype = autocast_dtype(x)
        ctx.layer, ctx.shape, ctx.dtype, ctx.computed = layer, x.shape, x.dtype, dtype
        with torch.autocast(x.device.type, enabled=False):
            return layer.product(x.flatten(0, -2).to(dtype)).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        gradient = upstream[0].flatten(0, -2).to(ctx.computed)
        with torch.autocast(gradient.device.type, enabled=False):
            return ctx.layer.back(gradient).to(ctx.dtype).view(ctx.shape), None


class DequantizedLinear(FrozenLinear):
    """A layer that multiplies rows by its dequantized weight."""

    def product(self, rows: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(rows.dtype)
        return F.linear(rows, self.unpacked(rows.dtype), bias)

    def back(self, gradient: Tensor) -> Tensor:
        return gradient @ self.unpacked(gradient.dtype)


class Int8Linear(DequantizedLinear):
    """A weight as bitsandbytes stores it for LLM.int8: integers, and a scale per output. Rows are not rounded."""

    scale: Tensor

    def __init__(self, weight: Tensor, bias: nn.Parameter | None) -> None:
        from bitsandbytes.functional import int8_vectorwise_quant

        super().__init__(weight, bias)
        integers, largest, _ = int8_vectorwise_quant(weight.to(torch.float16).contiguous())
        self.weight = nn.Parameter(integers, requires_grad=False)
        # a GPU would divide by multiplying with the reciprocal, a CPU not: this gives the same number on both
        self.register_buffer("scale", largest[:, None] * (1 / _INT8_MAX))

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        weight: Tensor = torch.ops.app_kernels.dequantize_int8(self.weight, self.scale, dtype)
        return weight


def _dequantize(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype).mul_(scale.to(dtype))


# One operation, so that compiled layers never save a dequantized weight for their backward pass
_INT8_OPS = torch.library.Library("app_kernels", "FRAGMENT")
_INT8_OPS.define("dequantize_int8(Tensor weight, Tensor scale, ScalarType dtype) -> Tensor")
for _device in ("CPU", "CUDA"):
    _INT8_OPS.impl("dequantize_int8", _dequantize, _device)
torch.library.register_fake(
    "app_kernels::dequantize_int8", lambda weight, _scale, dtype: torch.empty_like(weight, dtype=dtype), lib=_INT8_OPS
)
COSTS["app_kernels::dequantize_int8"] = OperationCost()


# ---- LLM.int8


_MIN_AMAX = 1e-12  # per row, so that a row of zeros has a scale

# One operation, so that a memory plan sees no shape that depends on values
_INT8_OPS.define("llm_int8_product(Tensor rows, Tensor weight, Tensor scale, float threshold) -> Tensor")


def round_rows(rows: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows [n, k] as float32 integers, the scale of each [n, 1], and the columns with an outlier, which are 0.

    As in bitsandbytes, rows are read in float16, and only the outliers are left out of the maximum of a row, not the
    other values of their columns.
    """
    numbers = rows.to(torch.float16).float()
    outliers = numbers.abs() >= threshold
    columns = outliers.any(0).nonzero()[:, 0]
    largest = torch.linalg.vector_norm(numbers.masked_fill_(outliers, 0), torch.inf, -1, keepdim=True)
    largest.clamp_(min=_MIN_AMAX)
    numbers[:, columns] = 0
    return numbers.mul_(_INT8_MAX / largest).round_(), largest.mul_(1 / _INT8_MAX), columns


def llm_int8_reference(rows: Tensor, weight: Tensor, scale: Tensor, threshold: float) -> Tensor:
    """Return rows [n, k] times an int8 weight [m, k] transposed: columns with an outlier in the dtype of the rows, the
    others rounded to int8, with products of integers summed in float32.
    """
    integers, of_rows, columns = round_rows(rows, threshold)
    out = (integers @ weight.float().T).mul_(of_rows).mul_(scale.T).to(rows.dtype)
    return out.addmm_(rows[:, columns], _dequantize(weight[:, columns], scale, rows.dtype).T)


def _llm_int8_by_bitsandbytes(rows: Tensor, weight: Tensor, scale: Tensor, threshold: float) -> Tensor:
    from bitsandbytes.functional import int8_vectorwise_quant

    integers, largest, columns = int8_vectorwise_quant(rows.to(torch.float16), threshold)
    of_weight = scale.flatten() * _INT8_MAX
    out: Tensor = torch.ops.bitsandbytes.int8_mixed_scaled_mm(rows, integers, weight, largest, of_weight, columns)[0]
    return out


def _llm_int8_flops(rows: Size, weight: Size, *_args: Any, **_kwargs: Any) -> int:
    return 2 * rows[0] * rows[1] * weight[0]


# Bytes beyond the output, without outlier columns, whose number is unknown before a run. On a GPU such a column takes
# 2 bytes per row and 7 per output, when the int32 sums of the others, 4 bytes per row and output, are free again.
def _llm_int8_bytes(rows: Tensor, weight: Tensor, *_others: Any) -> int:
    """Return the bytes of rows, their absolute values and flags; then of rows, weight and sums, all in float32."""
    products = len(rows) * len(weight)
    sums = 0 if rows.dtype == torch.float32 else products
    rounding = 9 * rows.numel() - products * rows.itemsize
    return max(rounding, torch.float32.itemsize * (rows.numel() + weight.numel() + sums))


def _llm_int8_gpu_bytes(rows: Tensor, weight: Tensor, *_others: Any) -> int:
    """Return the bytes of rows in int8 with their absolute values and flags; then with sums in int32 and float16."""
    size, products = (4 if rows.dtype == torch.float16 else 6), len(rows) * len(weight)
    return max(size * rows.numel() - products * rows.itemsize, rows.numel() + size * products)


_INT8_OPS.impl("llm_int8_product", llm_int8_reference, "CPU")
_INT8_OPS.impl("llm_int8_product", _llm_int8_by_bitsandbytes, "CUDA")
torch.library.register_fake(
    "app_kernels::llm_int8_product",
    lambda rows, weight, _scale, _threshold: rows.new_empty((len(rows), len(weight))),
    lib=_INT8_OPS,
)
COSTS["app_kernels::llm_int8_product"] = OperationCost(_llm_int8_flops, _llm_int8_bytes, _llm_int8_gpu_bytes)


class LlmInt8Linear(Int8Linear):
    """LLM.int8: rows are rounded too, except columns with an outlier. All rows of a call share these columns, so the
    result of a row depends on the others.
    """

    rounds_rows = True

    def product(self, rows: Tensor) -> Tensor:
        if not self.rounds_rows:
            return super().product(rows)
        weight, scale = self.weight, self.scale
        out: Tensor = torch.ops.app_kernels.llm_int8_product(rows.contiguous(), weight, scale, OUTLIER_THRESHOLD)
        return out if self.bias is None else out.add_(self.bias)


# ---- fp8 linear


Rounded = tuple[Tensor, Tensor]  # rows [n, k] in e4m3, and the scale of each [n, 1]

E4M3 = torch.float8_e4m3fn
_E4M3_MAX = 448.0
_TILE_ROWS = 256

_COMPARED_ROWS = 32
# Allowed difference of a product from the same numbers multiplied in float32: bf16 rounds to 0.002, and Hopper's fast
# accumulation keeps 14 bits. fp8 itself rounds by 0.037.
_ALLOWED_BF16 = 0.02
_ALLOWED_FP32 = 1e-5

# torch operations, so that a memory plan can count them
_FP8_OPS = torch.library.Library("app_fp8", "DEF")
_FP8_OPS.define("quantize_rows(Tensor rows) -> (Tensor, Tensor)")
_FP8_OPS.define("product(Tensor x, Tensor sx, Tensor w, Tensor sw, ScalarType dtype) -> Tensor")


def quantize_reference(rows: Tensor) -> Rounded:
    """Return rows in e4m3 and their scales; a value is its e4m3 number times the scale of its row."""
    wide = rows.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    largest = torch.linalg.vector_norm(wide, torch.inf, -1, keepdim=True).clamp_(min=_MIN_AMAX)
    # dividing a number by a tensor, or on a GPU a tensor by a number, rounds twice; the kernel rounds once
    wide.mul_(torch.full_like(largest, _E4M3_MAX).div_(largest)).clamp_(-_E4M3_MAX, _E4M3_MAX)
    return wide.to(E4M3), _scales_of(rows).copy_(largest.mul_(1 / _E4M3_MAX))


def quantize_by_kernel(rows: Tensor) -> Rounded:
    """Compute `quantize_reference` in one kernel launch, if a program can hold a row."""
    from app.layers import triton_kernels

    if rows.shape[1] > triton_kernels.MAX_WIDTH:
        return quantize_reference(rows)
    out, scales = _quantized_like(rows)
    triton_kernels.quantize_rows(rows, out, scales, _MIN_AMAX, _E4M3_MAX)
    return out, scales


def _quantize_on_gpu(rows: Tensor) -> Rounded:
    return quantize_by_kernel(rows) if can_run(rows.device) else quantize_reference(rows)


def _quantized_like(rows: Tensor) -> Rounded:
    return torch.empty_like(rows, dtype=E4M3), _scales_of(rows)


def _scales_of(rows: Tensor) -> Tensor:
    """Allocate a scale per row, in whole tiles of CUTLASS: its products have read beyond the last scale (pytorch
    #133334), and torch copies scales of other sizes into larger ones for each product.
    """
    room = -(-rows.shape[0] // _TILE_ROWS) * _TILE_ROWS
    return rows.new_empty((room, 1), dtype=torch.float32)[: rows.shape[0]]


def product_reference(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x [n, k] times w [m, k] transposed, with scales [n, 1] and [1, m], summed in float32."""
    return (x.float() @ w.float().T).mul_(sx).mul_(sw).to(dtype)


def product_on_gpu(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows times a weight, with their scales, by cuBLAS.

    Gradients use fast accumulation too: on an H200 their errors are the same without it.
    """
    return torch._scaled_mm(x, w.t(), sx, sw, out_dtype=torch.bfloat16, use_fast_accum=True).to(dtype)


_FP8_OPS.impl("quantize_rows", quantize_reference, "CPU")
_FP8_OPS.impl("quantize_rows", _quantize_on_gpu, "CUDA")
_FP8_OPS.impl("product", product_reference, "CPU")
_FP8_OPS.impl("product", product_on_gpu, "CUDA")
torch.library.register_fake("app_fp8::quantize_rows", _quantized_like, lib=_FP8_OPS)
torch.library.register_fake(
    "app_fp8::product", lambda x, _sx, w, _sw, dtype: x.new_empty((len(x), len(w)), dtype=dtype), lib=_FP8_OPS
)


def _product_flops(x: Size, _sx: Size, w: Size, *_args: Any, **_kwargs: Any) -> int:
    return 2 * x[0] * x[1] * w[0]


def _reference_bytes(x: Tensor, _sx: Tensor, w: Tensor, _sw: Tensor, dtype: torch.dtype) -> int:
    """Return the bytes of both sides in float32, and of their product for another dtype."""
    sums = 0 if dtype == torch.float32 else len(x) * len(w)
    return (x.numel() + w.numel() + sums) * torch.float32.itemsize


def _gpu_bytes(x: Tensor, _sx: Tensor, w: Tensor, _sw: Tensor, dtype: torch.dtype) -> int:
    """Return the bytes of the bf16 product that a GPU converts."""
    return 0 if dtype == torch.bfloat16 else len(x) * len(w) * torch.bfloat16.itemsize


# rows are rounded through float32; the kernel needs no copy
COSTS["app_fp8::quantize_rows"] = OperationCost(cpu_bytes=lambda rows: rows.numel() * torch.float32.itemsize)
COSTS["app_fp8::product"] = OperationCost(_product_flops, _reference_bytes, _gpu_bytes, in_fp8=True)


def quantize_rows(rows: Tensor) -> Rounded:
    """Return rows in e4m3 and their scales, by the kernel on a GPU."""
    rounded: Rounded = torch.ops.app_fp8.quantize_rows(rows.contiguous())
    return rounded


def product(rows: Rounded, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows times a weight."""
    result: Tensor = torch.ops.app_fp8.product(*rows, weight.view(E4M3), scales, dtype)
    return result


class Fp8Linear(FrozenLinear):
    """An fp8 layer. Weights are stored as bytes, so that casting a network does not change them."""

    weight_back: nn.Parameter
    scale: Tensor
    scale_back: Tensor
    rounds_rows = True

    def __init__(self, weight: Tensor, bias: nn.Parameter | None) -> None:
        super().__init__(weight, bias)
        for name, matrix in (("", weight), ("_back", weight.T)):
            bytes_, scales = quantize_reference(matrix)  # the kernel is not compared yet
            stored = nn.Parameter(bytes_.view(torch.uint8), requires_grad=False)
            setattr(self, f"weight{name}", stored)
            self.register_buffer(f"scale{name}", scales.T.clone())

    def product(self, rows: Tensor) -> Tensor:
        if self.rounds_rows:
            out = product(quantize_rows(rows), self.weight, self.scale, rows.dtype)
        else:
            out = rows @ self.unpacked(rows.dtype).T
        return out if self.bias is None else out.add_(self.bias)

    def back(self, gradient: Tensor) -> Tensor:
        if not self.rounds_rows:
            return gradient @ self.unpacked(gradient.dtype)
        return product(quantize_rows(gradient), self.weight_back, self.scale_back, gradient.dtype)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        return (self.weight.view(E4M3).float() * self.scale.T).to(dtype)


@contextmanager
def without_row_rounding(network: nn.Module) -> Iterator[None]:
    """Turn off row rounding inside this context, for other comparisons: rounding enlarges small differences."""
    layers = [layer for layer in network.modules() if isinstance(layer, Fp8Linear | LlmInt8Linear)]
    try:
        for layer in layers:
            layer.rounds_rows = False
        yield
    finally:
        for layer in layers:
            del layer.rounds_rows


@torch.no_grad()
def compare_products(network: nn.Module, present: Callable[[nn.Module], Any] = nullcontext) -> list[Comparison]:
    """Compare products of each layer size on this device with float32; refuse a difference.

    `present` is a context in which a module has its weights.
    """
    layers = {tuple(layer.weight.shape): layer for layer in network.modules() if isinstance(layer, Fp8Linear)}
    results = []
    for layer in layers.values():
        with present(layer):
            results.append(_compared("product", layer.weight, layer.scale))
            results.append(_compared("product with the transposed", layer.weight_back, layer.scale_back))
    for result in results:
        cause = result if isinstance(result, Fault) else f"{result} on this device"
        result.or_refuse(f"quantization.kind=fp8: {cause}. Set quantization=none.")
    return results


def _compared(words: str, weight: Tensor, scales: Tensor) -> Comparison:
    outputs, inputs = weight.shape
    dtype, allowed = (torch.bfloat16, _ALLOWED_BF16) if weight.is_cuda else (torch.float32, _ALLOWED_FP32)
    # rows of different sizes, not random: a run's random numbers must not depend on comparisons
    places = torch.arange(_COMPARED_ROWS * inputs, device=weight.device, dtype=torch.float32).view(-1, inputs)
    rows = (torch.sin(places) * (1 + places[:, :1] / inputs)).to(dtype)
    expected = product_reference(*quantize_reference(rows), weight.view(E4M3), scales, torch.float32)

    def compare() -> Comparison:
        difference = max_difference([product(quantize_rows(rows), weight, scales, dtype)], [expected])
        return Comparison(f"fp8 {words} weight, {inputs} to {outputs}, against float32", difference, allowed)

    fault = f"torch {torch.__version__} cannot multiply {(outputs, inputs)} in fp8 on this device ({{}})"
    return attempt(compare, Exception, fault)  # raised by torch's operation or our kernel's compiler
