"""FlashAttention 4 as operations of torch, so that compiled layers can have it in their graphs.

The package's own function is an autograd.Function over kernels written in Python, at which a graph breaks.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from app.layers.operations import COSTS, OperationCost

_INTERFACE = "flash_attn.cute.interface"
_RULES = "Tensor bounds, int longest, float? scale, bool causal, int? left, int? right, float softcap"
_FORWARD = f"(Tensor q, Tensor k, Tensor v, {_RULES}) -> (Tensor, Tensor)"
_BACKWARD = (
    f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, {_RULES}) -> (Tensor, Tensor, Tensor)"
)


def attention(  # noqa: PLR0913, PLR0917  the arguments of `flash_attn.cute.flash_attn_varlen_func` that we give
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
    """Attention of documents to themselves: bounds and longest of queries and keys are the same."""
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
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))  # of their own: strides must be those that graphs know
    import_module(_INTERFACE)._flash_attn_bwd(q, k, v, out, grad, sums, dq=dq, dk=dk, dv=dv, **_options(*rules))
    return dq, dk, dv


@_backward.register_fake
def _backward_shapes(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# bounds lie on the device, so FLOPs and memory are those of the plan's own operation
COSTS["app::flash4"] = COSTS["app::flash4_backward"] = OperationCost()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bounds, *ctx.rules = inputs
    ctx.save_for_backward(q, k, v, *output, bounds)


def _gradients(ctx: Any, grad: Tensor, _of_sums: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(grad, *ctx.saved_tensors, *ctx.rules), *[None] * 7)


_forward.register_autograd(_gradients, setup_context=_keep)
