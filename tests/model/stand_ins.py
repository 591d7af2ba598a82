"""Plain arithmetic with the signatures of kernels that only GPUs have, so that their arguments are checked."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from app.layers.attention.requirements import Needs

Window = tuple[int, int]

# needs that every such kernel can serve
NEEDS = Needs(
    packed=True, compute=torch.bfloat16, softcap=False, sinks=False, dropout=False, heads=frozenset({(64, 64)})
)


def torch_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: Window = (-1, -1),
) -> Tensor:
    assert isinstance(window_size, tuple), "causal is told by comparing with a tuple"
    return attend((query, key, value), (cu_seq_q, cu_seq_k), (max_q, max_k), scale, window_size)


def torch_2_13(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: Window = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    assert enable_gqa or query.shape[1] == key.shape[1], "it raises where shared heads are not named"
    assert cu_seq_k is not None
    return torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


def flash_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    window = (window_size[0], 0) if causal else window_size
    bounds, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    return attend((q, k, v), bounds, longest, softmax_scale, window, softcap)


def flash_3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Returns the log-sum-exp too, as first releases do."""
    window = (window_size[0], 0) if causal else window_size
    bounds, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    return attend((q, k, v), bounds, longest, softmax_scale, window, softcap), torch.empty(0)


class Flash4:
    """The functions of `flash_attn.cute.interface` that flash-attn 4 has beside the one with gradients."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, window_size: tuple[int | None, int | None] = (None, None), softcap: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        raise AssertionError("it is an autograd.Function, which graphs cannot have")

    @staticmethod
    def _flash_attn_fwd(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        softcap: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor, None, None, None]:
        assert return_lse, "there would be none: inside an operation no input needs a gradient"
        assert -1 not in (window_size_left, window_size_right), "None is an open window"
        left, right = (-1 if side is None else side for side in (window_size_left, window_size_right))
        window = (left, 0) if causal else (left, right)
        bounds, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        out = attend((q, k, v), bounds, longest, softmax_scale, window, softcap or 0.0)
        return out, torch.zeros(q.shape[1], q.shape[0]), None, None, None

    @staticmethod
    def _flash_attn_bwd(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        grad: Tensor,
        lse: Tensor,
        *,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert out.shape == grad.shape == q.shape
        assert lse.shape == (q.shape[1], q.shape[0])
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]

        def gradients() -> tuple[Tensor, ...]:
            again = Flash4._flash_attn_fwd(q=leaves[0], k=leaves[1], v=leaves[2], return_lse=True, **options)[0]
            return torch.autograd.grad(again, leaves, grad)

        with ThreadPoolExecutor() as other:  # an operation runs below autograd, in its own thread
            for gradient, found in zip((dq, dk, dv), other.submit(gradients).result(), strict=True):
                gradient.copy_(found)
        return dq, dk, dv


def attend(
    tokens: tuple[Tensor, Tensor, Tensor],
    bounds: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float | None,
    window: Window,
    softcap: float = 0.0,
) -> Tensor:
    """[T, H, D] of documents one after another, each by itself; `window` is inclusive, -1 is everything."""
    q, k, v = tokens
    assert {t.dtype for t in tokens} <= {q.dtype}, "kernels take one dtype"
    assert all(t.dim() == 3 and t.stride(-1) == 1 for t in tokens)
    assert q.shape[0] == k.shape[0] == v.shape[0]
    assert bounds[0] is bounds[1], "some kernels are causal only where both are one tensor"
    assert bounds[0].dtype == torch.int32
    assert longest[0] == longest[1]
    edges = bounds[0].tolist()
    assert edges[0] == 0
    assert edges[-1] == q.shape[0]
    shared = q.shape[1] // k.shape[1]
    pieces = []
    for start, end in pairwise(edges):
        assert end - start <= longest[0], "the rest of this document would not be computed"
        if end > start:
            part = slice(start, end)
            keys, values = (t[part].repeat_interleave(shared, dim=1) for t in (k, v))
            pieces.append(_one(q[part], keys, values, scale, window, softcap))
    return torch.cat(pieces)


def _one(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: Window, softcap: float) -> Tensor:
    scores = torch.einsum("ihd,jhd->hij", q.float(), k.float()) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(len(q))[:, None], torch.arange(len(q))[None, :]
    hidden = torch.zeros(len(q), len(q), dtype=torch.bool)
    if window[0] >= 0:
        hidden |= j < i - window[0]
    if window[1] >= 0:
        hidden |= j > i + window[1]
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    return torch.einsum("hij,jhd->ihd", weights, v.float()).to(q.dtype)
