"""Multiplications and additions of a step, counted by torch's FlopCounterMode."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

Size = Sequence[int]
_FP8 = "app_fp8::product"


def _product_with_packed(rows: Size, _packed: Size, shape: Size, *_more: Any, **_named: Any) -> int:
    return 2 * math.prod(rows[:-1]) * shape[0] * shape[1]


def _product_in_fp8(
    rows: Size, _row_scales: Size, weight: Size, _weight_scales: Size, *_more: Any, **_named: Any
) -> int:
    return 2 * rows[0] * rows[1] * weight[0]


def _product_added_in_place(_sum: Size, left: Size, right: Size, **_named: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


def _grouped_product(left: Size, right: Size, *_more: Any, **_named: Any) -> int:
    """Every row meets the weights of one expert."""
    groups = left[0] if len(left) == len(right) == 3 else 1  # as many products as there are
    return 2 * groups * left[-2] * left[-1] * right[-1]


def _attention(q: Size, _k: Size, v: Size, pairs: int, **_named: Any) -> int:
    """Scores and their use: two multiplications for each pair of a query and a key."""
    return 2 * q[1] * (q[3] + v[3]) * pairs


def _attention_backward(
    _grad: Size, q: Size, k: Size, v: Size, _out: Size, _sums: Size, pairs: int, **_named: Any
) -> int:
    """Five multiplications: the scores once more, and those of the gradients."""
    return _attention(q, k, v, pairs) * 5 // 2


def _attention_on_cpu(
    q: Size, k: Size, v: Size, _dropout: float = 0.0, causal: bool = False, **_named: Any
) -> int:
    batch, _, length, _ = q
    pairs = length * (length + 1) // 2 if causal else length * length
    return _attention(q, k, v, batch * pairs)


def _attention_on_cpu_backward(
    _grad: Size,
    q: Size,
    k: Size,
    v: Size,
    _out: Size,
    _sums: Size,
    dropout: float,
    causal: bool,
    **_named: Any,
) -> int:
    return _attention_on_cpu(q, k, v, dropout, causal) * 5 // 2


_FORMULAS: dict[str, Callable[..., int]] = {  # torch's own table knows the rest
    "bitsandbytes::gemm_4bit": _product_with_packed,
    _FP8: _product_in_fp8,
    "aten::addmm_": _product_added_in_place,
    "aten::_grouped_mm": _grouped_product,
    "app_plan::attention": _attention,
    "app_plan::attention_backward": _attention_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention_on_cpu,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_on_cpu_backward,
}


class _NoModules(AbstractContextManager["_NoModules"]):
    """In place of torch's tracker of modules, which keeps every node of a graph, and so what it saved, to the end."""

    parents = frozenset({"Global"})

    def __exit__(self, *_raised: object) -> None:
        """Nothing was begun."""


class Arithmetic:
    """Of a micro-batch's passes and of the update; `mode` counts while it is entered."""

    def __init__(self) -> None:
        known = ((_packet(name), formula) for name, formula in _FORMULAS.items())
        mapping = {packet: formula for packet, formula in known if packet is not None}
        self.mode = FlopCounterMode(display=False, custom_mapping=mapping)
        self.mode.mod_tracker = _NoModules()  # type: ignore[assignment]
        self.in_backward = False
        self._repeated = 0
        self._passes: int | None = None

    def telling_repeats(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """What a layer's forward computes once backward has begun, it computes again."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before = self.mode.get_total_flops()
            try:
                return forward(*args, **kwargs)
            finally:
                if self.in_backward:
                    self._repeated += self.mode.get_total_flops() - before

        return run

    def end_passes(self) -> None:
        """Count what comes from here on as the update."""
        if self._passes is None:
            self._passes = self.mode.get_total_flops()

    def counted(self, passes: int = 1) -> dict[str, int]:
        """Operations of one pass, those of them that are in fp8 or were computed before, and of the update."""
        total = self.mode.get_total_flops()
        in_passes = total if self._passes is None else self._passes
        in_fp8 = self.mode.get_flop_counts().get("Global", {}).get(_packet(_FP8), 0)
        return {
            "flops": in_passes // passes,
            "fp8": in_fp8 // passes,
            "repeated": self._repeated // passes,
            "update": total - in_passes,
        }


def _packet(name: str) -> Any | None:
    """None where the library of an operation is not loaded."""
    library, _, operation = name.partition("::")
    return getattr(getattr(torch.ops, library), operation, None)
