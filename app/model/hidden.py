"""What operations take while they run and nobody sees from outside: a table, for those that are one call to torch."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Hidden = Mapping[str, Callable[..., int]]  # full name of an operation -> bytes for its arguments

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


HIDDEN: Hidden = {"bitsandbytes::gemm_4bit": _unpacked_weight}
