"""The product of a mixture of experts in a trace: rows that are grouped by expert, each group with its own weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAME = "aten::_grouped_mm"


def grouped(call: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """torch computes it in other types than bf16, too, but tells its shapes only there."""
    left, right, *rest = args
    if left.dtype == torch.bfloat16:
        return call(func, args, kwargs)  # type: ignore[no-any-return]
    out = call(func, (_narrow(left), _narrow(right), *rest), kwargs)
    return torch.empty_strided(out.size(), out.stride(), dtype=left.dtype)


def flops(left: Tensor, right: Tensor, *_more: Any, **_named: Any) -> int:
    """Every row meets the weights of one expert. torch's own table does not know it."""
    pairs = left.shape[-2] * left.shape[-1] * right.shape[-1]
    experts = left.shape[0] if left.ndim == right.ndim == 3 else 1  # as many products as there are
    return 2 * pairs * experts


def _narrow(given: Tensor) -> Tensor:
    return torch.empty_strided(given.size(), given.stride(), dtype=torch.bfloat16)
