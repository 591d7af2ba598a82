"""What operations take while they run and nobody sees from outside: a table, for those that are one call to torch."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from app.model.kernels import loss

Hidden = Mapping[str, Callable[..., int]]  # full name of an operation -> bytes for its arguments

_WIDE = 4  # bytes of a float32
_NESTED = 8  # bytes a block: the scales as they were, and once more with their offset


def _unpacked_weight(
    given: Tensor,
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
    """bitsandbytes unpacks the whole weight before it multiplies by as many rows as training has."""
    count = shape[0] * shape[1]
    scales = 0 if absmax_8bit is None else -(-count // block) * _NESTED
    return count * given.element_size() + scales


def _wide_rows(rows: Tensor) -> int:
    """Rounded to e4m3 by way of float32."""
    return rows.numel() * _WIDE


def _wide_product(
    rows: Tensor, _of_rows: Tensor, weight: Tensor, _of_weight: Tensor, dtype: torch.dtype, _fast: bool
) -> int:
    """Both sides in float32, and their product where another dtype is wanted."""
    sums = 0 if dtype == torch.float32 else rows.shape[0] * weight.shape[0]
    return (rows.numel() + weight.numel() + sums) * _WIDE


def _narrow_product(
    rows: Tensor, _of_rows: Tensor, weight: Tensor, _of_weight: Tensor, dtype: torch.dtype, _fast: bool
) -> int:
    """A GPU's products come in bf16."""
    return 0 if dtype == torch.bfloat16 else rows.shape[0] * weight.shape[0] * torch.bfloat16.itemsize


HIDDEN: Hidden = {
    "bitsandbytes::gemm_4bit": _unpacked_weight,
    "app_kernels::spend_logits": loss.hidden,
    "app_fp8::quantize_rows": _wide_rows,
    "app_fp8::product": _wide_product,
}


def _nothing(*_given: Any) -> int:
    """A kernel rounds rows as it reads them."""
    return 0


ON_GPU: Hidden = {
    **HIDDEN,
    "app_fp8::quantize_rows": _nothing,
    "app_fp8::product": _narrow_product,
}
