"""Variable-length attention: kernels that take all documents of a packed row in one call, by `cu_seqlens`.

Two of them: flash-attn's package, and torch's own `varlen_attn` (flash-attn 2 inside torch). Both take the tokens of
all documents one after another, [T, H, D], in 16-bit numbers. Padded rows go to `sdpa`.
"""

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from app.batch import PackedSequences
from app.model.attention.requirements import Kernel, Rules, missing_gpu, require_rules
from app.model.attention.sdpa import sdpa
from app.model.kernels import autocast_dtype

_HOPPER = 9  # compute capability; flash-attn 3 knows no other


def varlen_kernel(name: str, function: Callable[..., Any]) -> Kernel:
    """Attention by `flash_attn_varlen_func` of either version (flash), or by torch's `varlen_attn` (varlen)."""
    is_flash = name == "flash"
    names_shared_heads = _accepts(function, "enable_gqa")  # older versions of torch take fewer key heads as they are

    def run(q: Tensor, k: Tensor, v: Tensor, rules: Rules, documents: PackedSequences | None) -> Tensor:
        if documents is None:
            return sdpa(q, k, v, rules, None)
        require_rules(name, rules, softcap=is_flash)
        # autocast does not know these kernels, and rotary embeddings or norms may have widened q and k
        dtype = autocast_dtype(v)
        query, key, value = (each.to(dtype)[0].transpose(0, 1) for each in (q, k, v))
        if is_flash:
            options = {"softmax_scale": rules.scale, "causal": rules.causal, "softcap": rules.softcap or 0.0}
        else:
            shares_heads = names_shared_heads and q.shape[1] != k.shape[1]
            options = {"scale": rules.scale, **({"enable_gqa": True} if shares_heads else {})}
        bounds, longest = documents.cu_seqlens, documents.max_seqlen
        window = _window(rules, longest)
        out = function(query, key, value, bounds, bounds, longest, longest, window_size=window, **options)
        out = out[0] if isinstance(out, tuple) else out  # some versions return their log-sum-exp too
        return out.transpose(0, 1)[None]  # type: ignore[no-any-return]

    return run


def _window(rules: Rules, longest: int) -> tuple[int, int]:
    """Tokens to the left and right of itself that a query sees; -1 is all of them."""
    left = -1 if rules.window is None or rules.window >= longest else rules.window - 1
    return left, 0 if rules.causal else left


def varlen_requires(name: str, device: torch.device) -> list[str]:
    """The GPU or package that kernel `name` lacks; a package that was built for another torch counts as missing."""
    missing = missing_gpu(device)
    return missing or ([] if _FIND_FUNCTION[name](device) else [_PACKAGES[name]])


@cache
def varlen_on(name: str, device: torch.device) -> Kernel:
    """Kernel `name` for tensors of `device`."""
    function = _FIND_FUNCTION[name](device)
    assert function is not None, "varlen_requires comes first"
    return varlen_kernel(name, function)


def find_flash(device: torch.device) -> Callable[..., Any] | None:
    """flash-attn 3 on Hopper where it is installed, else 2."""
    hopper = torch.cuda.get_device_capability(device)[0] == _HOPPER
    for package in ("flash_attn_interface", "flash_attn") if hopper else ("flash_attn",):
        try:
            function: Callable[..., Any] = import_module(package).flash_attn_varlen_func
        except (ImportError, AttributeError, OSError):  # missing, or built for another torch
            continue
        if _accepts(function, "softcap", "window_size"):
            return function
    return None


def _find_varlen(_device: torch.device) -> Callable[..., Any] | None:
    """torch's function; before torch 2.11 it could neither scale nor have a window."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn if _accepts(varlen_attn, "scale", "window_size") else None


_FIND_FUNCTION = {"flash": find_flash, "varlen": _find_varlen}
_PACKAGES = {
    "flash": "the package flash-attn 2.6 or newer, built for this torch",
    "varlen": f"torch 2.11 or newer (this is {torch.__version__})",
}


def _accepts(function: Callable[..., Any], *names: str) -> bool:
    return set(names) <= set(inspect.signature(function).parameters)
