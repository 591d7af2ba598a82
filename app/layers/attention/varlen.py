"""Variable-length attention: kernels that take all documents of a packed row in one call, by `cu_seqlens`.

Two of them: flash-attn's packages (2, 3 and 4), and torch's own `varlen_attn` (flash-attn 2 inside torch). All take
the concatenated tokens of all documents, [T, H, D], in 16 bits. Padded rows go to `sdpa`.

FlashAttention 4 is wrapped as torch operations: the package's own function is an autograd.Function over kernels
written in Python, which breaks the graph.
"""

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from app.batch import PackedSequences
from app.layers.attention.requirements import Kernel, Rules, missing_gpu, require_rules
from app.layers.attention.sdpa import sdpa
from app.layers.operations import COSTS, OperationCost, autocast_dtype

_INTERFACE = "flash_attn.cute.interface"
_RULES = "Tensor bounds, int longest, float? scale, bool causal, int? left, int? right, float softcap"
_FORWARD = f"(Tensor q, Tensor k, Tensor v, {_RULES}) -> (Tensor, Tensor)"
_BACKWARD = (
    f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, {_RULES}) -> (Tensor, Tensor, Tensor)"
)


def flash4_attention(  # noqa: PLR0913, PLR0917  our arguments of `flash_attn.cute.flash_attn_varlen_func`
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
) -> Tensor:
    """Compute self-attention per document: bounds and maximum length of queries and keys are equal."""
    assert cu_seqlens_k is cu_seqlens_q
    assert max_seqlen_k == max_seqlen_q
    out: Tensor = _forward(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, *window_size, softcap)[0]
    return out


def _options(
    bounds: Tensor, longest: int, scale: float | None, causal: bool, left: int | None, right: int | None, softcap: float
) -> dict[str, Any]:
    return {
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), bounds),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), longest),
        "softmax_scale": scale,
        "causal": causal,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": softcap,
    }


@torch.library.custom_op("app::flash4", mutates_args=(), schema=_FORWARD)
def _forward(q: Tensor, k: Tensor, v: Tensor, *rules: Any) -> tuple[Tensor, Tensor]:
    out, sums, *_ = import_module(_INTERFACE)._flash_attn_fwd(q, k, v, return_lse=True, **_options(*rules))
    return out, sums


@_forward.register_fake
def _forward_shapes(q: Tensor, _k: Tensor, v: Tensor, *_rules: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q.shape
    return q.new_empty(tokens, heads, v.shape[2]), q.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("app::flash4_backward", mutates_args=(), schema=_BACKWARD)
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *rules: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))  # new tensors: strides must be those of the graph
    import_module(_INTERFACE)._flash_attn_bwd(q, k, v, out, grad, sums, dq=dq, dk=dk, dv=dv, **_options(*rules))
    return dq, dk, dv


@_backward.register_fake
def _backward_shapes(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# bounds are on the device, so FLOPs and memory are those of the plan's own operation
COSTS["app::flash4"] = COSTS["app::flash4_backward"] = OperationCost()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bounds, *ctx.rules = inputs
    ctx.save_for_backward(q, k, v, *output, bounds)


def _gradients(ctx: Any, grad: Tensor, _of_sums: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(grad, *ctx.saved_tensors, *ctx.rules), *[None] * 7)


_forward.register_autograd(_gradients, setup_context=_keep)


# ---- varlen


def varlen_kernel(name: str, function: Callable[..., Any]) -> Kernel:
    """Return the kernel of `flash_attn_varlen_func` of any version (flash), or torch's `varlen_attn` (varlen)."""
    is_flash = name == "flash"
    unlimited = inspect.signature(function).parameters["window_size"].default[0]  # -1, or None in flash-attn 4
    names_shared_heads = _accepts(function, "enable_gqa")  # older versions of torch take fewer key heads as they are

    def run(q: Tensor, k: Tensor, v: Tensor, rules: Rules, documents: PackedSequences | None) -> Tensor:
        if documents is None:
            return sdpa(q, k, v, rules, None)
        require_rules(name, rules, softcap=is_flash)
        # autocast does not cover these kernels, and rotary embeddings or norms may have widened q and k
        dtype = autocast_dtype(v)
        query, key, value = (states.to(dtype)[0].transpose(0, 1) for states in (q, k, v))
        bounds, longest = documents.cu_seqlens, documents.max_seqlen
        options: dict[str, Any] = {"window_size": _window(rules, longest, unlimited)}
        if is_flash:  # by name: flash-attn 4 has one more argument before them
            options |= {"softmax_scale": rules.scale, "causal": rules.causal, "softcap": rules.softcap or 0.0}
            options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), bounds)
            options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), longest)
            out = function(query, key, value, **options)
        else:
            options |= {"enable_gqa": True} if names_shared_heads and q.shape[1] != k.shape[1] else {}
            out = function(query, key, value, bounds, bounds, longest, longest, scale=rules.scale, **options)
        out = out[0] if isinstance(out, tuple) else out  # some versions return their log-sum-exp too
        return out.transpose(0, 1)[None]  # type: ignore[no-any-return]

    return run


def _window(rules: Rules, longest: int, unlimited: int | None) -> tuple[int | None, int | None]:
    """Return the tokens to the left and right that a query sees; `unlimited` is all of them."""
    left = unlimited if rules.window is None or rules.window >= longest else rules.window - 1
    return left, 0 if rules.causal else left


def varlen_requires(name: str, device: torch.device) -> list[str]:
    """Return the GPU or package that kernel `name` lacks; a package built for another torch counts as missing."""
    missing = missing_gpu(device)
    return missing or ([] if _FIND_FUNCTION[name](device) else [_PACKAGES[name]])


@cache
def varlen_on(name: str, device: torch.device) -> Kernel:
    """Return kernel `name` for tensors of `device`."""
    function = _FIND_FUNCTION[name](device)
    assert function is not None, "varlen_requires comes first"
    return varlen_kernel(name, function)


_FLASH_2, _FLASH_3, _FLASH_4 = "flash_attn", "flash_attn_interface", "flash_attn.cute"  # packages of flash-attn
# by major compute capability, the fastest first; only flash-attn 2 has kernels for other GPUs
_FLASH = {9: (_FLASH_3, _FLASH_4, _FLASH_2), 10: (_FLASH_4, _FLASH_2)}


def find_flash(device: torch.device) -> Callable[..., Any] | None:
    """Return the function of the fastest installed flash-attn version with kernels for this GPU."""
    major, _ = torch.cuda.get_device_capability(device)
    for package in _FLASH.get(major, (_FLASH_2,)):
        try:
            function: Callable[..., Any] = import_module(package).flash_attn_varlen_func
        except (ImportError, AttributeError, OSError):  # missing, or built for another torch
            continue
        if _accepts(function, "softcap", "window_size"):
            return flash4_attention if package == _FLASH_4 else function
    return None


def _find_varlen(_device: torch.device) -> Callable[..., Any] | None:
    """Return torch's function; before torch 2.11 it had no scale and no window."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn if _accepts(varlen_attn, "scale", "window_size") else None


_FIND_FUNCTION = {"flash": find_flash, "varlen": _find_varlen}
_PACKAGES = {
    "flash": "the package flash-attn 2.6 or newer, built for this torch",
    "varlen": f"torch 2.11 or newer (this is {torch.__version__})",
}


def _accepts(function: Callable[..., Any], *names: str) -> bool:
    return set(names) <= set(inspect.signature(function).parameters)
