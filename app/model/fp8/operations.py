"""Rounding rows to e4m3, and products of what was rounded: operations of torch, so that a plan can count them."""

import torch
from torch import Tensor

from app.model.kernels import can_run

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
LEAST = 1e-12  # of the largest number of a row: one of zeros has a scale too


class _Kernels:
    """Whether they are used where they can run; the proof of a run takes that away, also from some alone."""

    def __init__(self) -> None:
        self.used = True
        self.refused: set[str] = set()  # forms of fp8.epilogue, by name


KERNELS = _Kernels()
_OPERATIONS = torch.library.Library("app_fp8", "DEF")
_OPERATIONS.define("quantize_rows(Tensor rows) -> (Tensor, Tensor)")
_OPERATIONS.define(
    "product(Tensor rows, Tensor of_rows, Tensor weight, Tensor of_weight, ScalarType dtype, bool fast) -> Tensor"
)


def quantize_reference(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [n, k] in e4m3, and the scale of each [n, 1]: what a number is to be multiplied with."""
    wide = rows.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    largest = torch.linalg.vector_norm(wide, torch.inf, -1, keepdim=True).clamp_(min=LEAST)
    # a number divided by a tensor, and a tensor by a number on a GPU, would be rounded twice: kernels do not
    wide.mul_(torch.full_like(largest, LARGEST).div_(largest)).clamp_(-LARGEST, LARGEST)
    return wide.to(E4M3), largest.mul_(1 / LARGEST)


def product_reference(
    rows: Tensor, of_rows: Tensor, weight: Tensor, of_weight: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """rows [n, k] times weight [m, k] transposed, each with its scales [n, 1] and [1, m]."""
    del fast  # sums are as exact as float32 is
    sums = rows.float() @ weight.float().T
    return sums.mul_(of_rows).mul_(of_weight).to(dtype)


def _product_on_gpu(
    rows: Tensor, of_rows: Tensor, weight: Tensor, of_weight: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    found: Tensor = torch._scaled_mm(
        rows, weight.t(), of_rows, of_weight, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return found.to(dtype)


def _quantize_on_gpu(rows: Tensor) -> tuple[Tensor, Tensor]:
    if not (KERNELS.used and can_run(rows.device)):
        return quantize_reference(rows)
    return quantize_by_kernel(rows)


def quantize_by_kernel(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The same in one launch, where a program can hold a row."""
    from app.model.kernels import fp8_triton

    if rows.shape[1] > fp8_triton.WIDEST:
        return quantize_reference(rows)
    out = torch.empty_like(rows, dtype=E4M3)
    scales = rows.new_empty((rows.shape[0], 1), dtype=torch.float32)
    fp8_triton.quantize_rows(rows, out, scales, LEAST, LARGEST)
    return out, scales


_OPERATIONS.impl("quantize_rows", quantize_reference, "CPU")
_OPERATIONS.impl("quantize_rows", _quantize_on_gpu, "CUDA")
_OPERATIONS.impl("product", product_reference, "CPU")
_OPERATIONS.impl("product", _product_on_gpu, "CUDA")


@torch.library.register_fake("app_fp8::quantize_rows")  # type: ignore[untyped-decorator]
def _quantized_shapes(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape, dtype=E4M3), rows.new_empty((rows.shape[0], 1), dtype=torch.float32)


@torch.library.register_fake("app_fp8::product")  # type: ignore[untyped-decorator]
def _product_shape(
    rows: Tensor, _of_rows: Tensor, weight: Tensor, _of_weight: Tensor, dtype: torch.dtype, _fast: bool
) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[0]), dtype=dtype)


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """As above, by what the device has for it."""
    found: tuple[Tensor, Tensor] = torch.ops.app_fp8.quantize_rows(rows.contiguous())
    return found


def product(
    rows: tuple[Tensor, Tensor], weight: Tensor, scales: Tensor, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """As above; `fast` sums are those of a forward pass, a gradient has exact ones."""
    found: Tensor = torch.ops.app_fp8.product(*rows, weight.view(E4M3), scales, dtype, fast)
    return found
