"""flash-attn, where it is installed: its third version on Hopper, else its second."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
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

_HOPPER = 9  # the third version knows no other generation
_THIRD, _SECOND = "flash_attn_interface", "flash_attn"


def requires(device: torch.device) -> list[str]:
    """A package that was built for another torch counts as missing."""
    lacking = gpu_lacking(device)
    if lacking:
        return lacking
    return (
        [] if _function(device) is not None else ["the package flash-attn 2.6 or newer, built for this torch"]
    )


def refuses(needs: Needs) -> list[str]:
    """Dropout of attention weights is refused too: the third version has none."""
    return refusals(needs, softcap=True)


def flash(q: Tensor, k: Tensor, v: Tensor, rules: Rules, documents: PackedSequences | None) -> Tensor:
    """With the package of this machine."""
    return bound(q.device)(q, k, v, rules, documents)


def kernel_of(function: Callable[..., Any]) -> Kernel:
    """Bound to one of the two; padded rows go to `sdpa`, one call for them too."""

    def run(q: Tensor, k: Tensor, v: Tensor, rules: Rules, documents: PackedSequences | None) -> Tensor:
        if documents is None:
            return sdpa(q, k, v, rules, None)
        require_rules("flash", rules, softcap=True)
        bounds, longest = documents.cu_seqlens, documents.max_seqlen

        def call(*tokens: Tensor) -> Any:
            return function(
                *tokens,
                bounds,
                bounds,
                longest,
                longest,
                softmax_scale=rules.scale,
                causal=rules.causal,
                window_size=window_of(rules, longest),
                softcap=rules.softcap or 0.0,
            )

        return side_by_side(call, q, k, v)

    return run


@cache
def bound(device: torch.device) -> Kernel:
    """To the package of this machine."""
    function = _function(device)
    assert function is not None, "`requires` is asked before"
    return kernel_of(function)


def _function(device: torch.device) -> Callable[..., Any] | None:
    hopper = torch.cuda.get_device_capability(device)[0] == _HOPPER
    for package in (_THIRD, _SECOND) if hopper else (_SECOND,):
        try:
            function: Callable[..., Any] = import_module(package).flash_attn_varlen_func
        except (ImportError, AttributeError, OSError):  # not there, or built for another torch
            continue
        if accepts(function, "softcap", "window_size"):
            return function
    return None
