"""Attention of a plan for a GPU: what a kernel keeps and takes, and its arithmetic, with nothing inside.

Modelled on flash-attn's: it keeps q, k, v, its output and a float32 sum for each query; its backward pass has a
float32 gradient of q, a float32 number for each query, and gradients of k and v for every query head before those of
shared heads are added up.
"""

from typing import Any

import torch
from torch import Tensor

from app.batch import Documents
from app.model.attention import Rules

NAME = "planned"  # what models are told to call


@torch.library.custom_op("app_plan::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("a plan never computes")


@_attention.register_fake
def _attention_shapes(q: Tensor, _k: Tensor, v: Tensor, _pairs: int) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _ = q.shape
    out = q.new_empty(batch, tokens, heads, v.shape[3]).transpose(1, 2)
    return out, q.new_empty(batch, heads, tokens, dtype=torch.float32)


@torch.library.custom_op("app_plan::attention_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, pairs: int
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("a plan never computes")


@_backward.register_fake
def _backward_shapes(
    _grad: Tensor, q: Tensor, k: Tensor, v: Tensor, _out: Tensor, _sums: Tensor, _pairs: int
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.pairs = inputs
    ctx.save_for_backward(q, k, v, *output)


def _gradients(ctx: Any, grad: Tensor, _grad_of_sums: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    return (*_backward(grad, *ctx.saved_tensors, ctx.pairs), None)


_attention.register_autograd(_gradients, setup_context=_keep)


def planned(q: Tensor, k: Tensor, v: Tensor, rules: Rules, documents: Documents | None) -> Tensor:
    """The kernel that a plan's model calls; in the number that autocast gives it."""
    device = q.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else v.dtype
    lengths = (q.shape[2],) * q.shape[0] if documents is None else documents.lengths
    out: Tensor = _attention(q.to(dtype), k.to(dtype), v.to(dtype), sum(_seen(n, rules) for n in lengths))[0]
    return out


def _seen(length: int, rules: Rules) -> int:
    """How many pairs of a query and a key of one document are looked at."""
    window = length if rules.window is None else min(rules.window, length)
    causal = window * (window + 1) // 2 + (length - window) * window
    return causal if rules.causal else length * length if window == length else 2 * causal - length


def hidden_in_backward(
    _grad: Tensor, q: Tensor, k: Tensor, v: Tensor, _out: Tensor, _sums: Tensor, _pairs: int
) -> int:
    """Bytes that are gone when it returns."""
    batch, heads, tokens, _ = q.shape
    own = 4 * q.numel() + 4 * batch * heads * tokens
    expanded = 0 if k.shape[1] == heads else (k.nbytes + v.nbytes) * heads // k.shape[1]
    return own + expanded


def flops(q: Tensor, _k: Tensor, v: Tensor, pairs: int, **_out: Any) -> int:
    """Scores and their use: two multiplications of a pair, each of 2 x its size."""
    return 2 * q.shape[1] * (q.shape[3] + v.shape[3]) * pairs


def flops_of_backward(
    _grad: Tensor, q: Tensor, k: Tensor, v: Tensor, _out: Tensor, _sums: Tensor, pairs: int, **_more: Any
) -> int:
    """Five multiplications: the scores once more, and those of the gradients."""
    return flops(q, k, v, pairs) * 5 // 2
