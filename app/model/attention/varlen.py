"""torch's own variable-length attention: flash-attn's second version, built into torch."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from app.batch import PackedSequences
from app.model.attention.dense import sdpa
from app.model.attention.ragged import (
    accepts,
    gpu_lacking,
    refusals,
    require_rules,
    side_by_side,
    window_of,
)
from app.model.attention.rules import Kernel, Needs, Rules


def requires(device: torch.device) -> list[str]:
    """Before 2.11 it could neither scale nor have a window."""
    function = _function()
    old = function is None or not accepts(function, "scale", "window_size")
    return [*gpu_lacking(device), *([f"torch 2.11 or newer (this is {torch.__version__})"] if old else [])]


def refuses(needs: Needs) -> list[str]:
    """Everything beyond windows and shared heads."""
    return refusals(needs)


def varlen(q: Tensor, k: Tensor, v: Tensor, rules: Rules, documents: PackedSequences | None) -> Tensor:
    """With the function of this torch."""
    return bound(q.device)(q, k, v, rules, documents)


def kernel_of(function: Callable[..., Any]) -> Kernel:
    """Bound to the arguments that `function` has; padded rows go to `sdpa`, one call for them too."""
    names_shared_heads = accepts(function, "enable_gqa")  # without it, fewer key heads are simply given

    def run(q: Tensor, k: Tensor, v: Tensor, rules: Rules, documents: PackedSequences | None) -> Tensor:
        if documents is None:
            return sdpa(q, k, v, rules, None)
        require_rules("varlen", rules)
        bounds, longest = documents.cu_seqlens, documents.max_seqlen
        shared = {"enable_gqa": True} if names_shared_heads and q.shape[1] != k.shape[1] else {}

        def call(*tokens: Tensor) -> Any:
            window = window_of(rules, longest)
            return function(
                *tokens, bounds, bounds, longest, longest, scale=rules.scale, window_size=window, **shared
            )

        return side_by_side(call, q, k, v)

    return run


@cache
def bound(_device: torch.device) -> Kernel:
    """To the function of this torch."""
    function = _function()
    assert function is not None, "`requires` is asked before"
    return kernel_of(function)


def _function() -> Callable[..., Any] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn
