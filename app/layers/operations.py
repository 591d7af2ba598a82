"""What operations cost that torch does not count; the FLOP counter and the storage counter read it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Size = Sequence[int]
Formula = Callable[..., int]


class OperationCost(NamedTuple):
    """What one call costs; None: nothing. Bytes are those that it allocates and frees before it returns."""

    flops: Formula | None = None  # of the call's arguments, with shapes in place of tensors
    cpu_bytes: Formula | None = None  # of the arguments
    gpu_bytes: Formula | None = None
    in_fp8: bool = False


def cost_of(name: str) -> OperationCost:
    """The cost of an operation, nothing for one of a library that is not in the table; ours must be."""
    cost = COSTS.get(name, _FREE)
    if cost is _FREE and name.startswith("app"):
        raise LookupError(f"{name} has no OperationCost. Give it one in COSTS, beside the operation.")
    return cost


def _product_added_in_place(_sum: Size, left: Size, right: Size, **_kwargs: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


def _grouped_product(left: Size, right: Size, *_args: Any, **_kwargs: Any) -> int:
    # each row is multiplied by the weights of one expert only, except in a batched product of 3-D tensors
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]


def attention_flops(q: Size, _k: Size, v: Size, pairs: int, **_kwargs: Any) -> int:
    """FLOPs of two products, q k^T and weights v, over the pairs of a query and a key."""
    return 2 * q[1] * (q[3] + v[3]) * pairs


def attention_backward_flops(
    _grad: Size, q: Size, k: Size, v: Size, _out: Size, _sums: Size, pairs: int, **_kwargs: Any
) -> int:
    """FLOPs of five products: the scores once more, and the gradients."""
    return attention_flops(q, k, v, pairs) * 5 // 2


def _attention_on_cpu(q: Size, k: Size, v: Size, _dropout: float = 0.0, causal: bool = False, **_kwargs: Any) -> int:
    batch, _, length, _ = q
    pairs = length * (length + 1) // 2 if causal else length * length
    return attention_flops(q, k, v, batch * pairs)


def _attention_on_cpu_backward(
    _grad: Size, q: Size, k: Size, v: Size, _out: Size, _sums: Size, dropout: float, causal: bool, **_kwargs: Any
) -> int:
    return _attention_on_cpu(q, k, v, dropout, causal) * 5 // 2


_FREE = OperationCost()
_CPU_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
COSTS: dict[str, OperationCost] = {  # by full name; those of bitsandbytes and our own are added where they are used
    "aten::addmm_": OperationCost(_product_added_in_place),
    "aten::_grouped_mm": OperationCost(_grouped_product),
    _CPU_ATTENTION: OperationCost(_attention_on_cpu),
    f"{_CPU_ATTENTION}_backward": OperationCost(_attention_on_cpu_backward),
}
