"""Multiplications and additions of the operations that a step consists of."""

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from operator import add
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from app.plan import attention, experts


def _product_with_packed(given: Tensor, _packed: Tensor, shape: list[int], *_more: Any, **_named: Any) -> int:
    return 2 * math.prod(given.shape[:-1]) * shape[0] * shape[1]


def _product_in_fp8(
    rows: Tensor, _of_rows: Tensor, weight: Tensor, _of_weight: Tensor, *_more: Any, **_named: Any
) -> int:
    return 2 * rows.shape[0] * rows.shape[1] * weight.shape[0]


def _product_added_in_place(_sum: Tensor, left: Tensor, right: Tensor, **_named: Any) -> int:
    return 2 * left.shape[0] * left.shape[1] * right.shape[1]


def _document_on_cpu(
    q: Tensor, _k: Tensor, v: Tensor, _dropout: float = 0.0, causal: bool = False, **_: Any
) -> int:
    batch, heads, length, size = q.shape
    pairs = length * (length + 1) // 2 if causal else length * length
    return 2 * batch * heads * (size + v.shape[3]) * pairs


def _document_on_cpu_backward(
    _grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _out: Tensor,
    _sums: Tensor,
    dropout: float,
    causal: bool,
    **_: Any,
) -> int:
    return _document_on_cpu(q, k, v, dropout, causal) * 5 // 2


_FP8 = "app_fp8::product"
# by the full name of the operation; torch's own table knows the rest
_FORMULAS: dict[str, Callable[..., int]] = {
    "bitsandbytes::gemm_4bit": _product_with_packed,
    _FP8: _product_in_fp8,
    "aten::addmm_": _product_added_in_place,
    experts.NAME: experts.flops,
    "app_plan::attention": attention.flops,
    "app_plan::attention_backward": attention.flops_of_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _document_on_cpu,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _document_on_cpu_backward,
}


@dataclass(slots=True)
class Flops:
    """Of a micro-batch, and of the optimizer's step."""

    passes: int = 0  # forward and backward
    fp8: int = 0  # of these, at the rate that a GPU has for fp8
    repeated: int = 0  # of these, what had been computed before
    update: int = 0

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(*map(add, astuple(self), astuple(other)))


class FlopCounter:
    """Told of every operation, adds up, apart for those whose turn it is."""

    def __init__(self) -> None:
        self.found: dict[int, Flops] = {}
        self.turn = 0  # whose it is
        self.updates = False  # whether weights are being changed
        self.again = False  # whether a layer's forward had been computed before
        self.repeats = False  # whether one is running

    def counted(self) -> dict[int, Flops]:
        """So far."""
        return {turn: replace(flops) for turn, flops in self.found.items()}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """One operation."""
        packet = func._overloadpacket
        own = _FORMULAS.get(packet._qualified_op_name)
        if own is not None:
            count = own(*args, **kwargs)
        elif packet in flop_registry:
            count = flop_registry[packet](*args, **kwargs, out_val=out)
        else:
            return
        flops = self.found.setdefault(self.turn, Flops())
        if self.updates:
            flops.update += count
            return
        flops.passes += count
        flops.fp8 += count if packet._qualified_op_name == _FP8 else 0
        flops.repeated += count if self.repeats else 0
