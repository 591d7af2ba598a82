"""Attention document by document, correct for every model on any machine; and the plain definition.

In compiled layers on a CPU it is one operation that reads the document bounds, so the graph does not depend on them.
On a GPU that would wait for the device in every layer, so there all documents must have one length.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from app.batch import PackedSequences
from app.errors import ConfigError
from app.layers.attention.requirements import HALVES, MAX_HEAD_SIZE, Rules, cannot, require_rules
from app.layers.operations import COSTS, OperationCost, autocast_dtype, is_ampere, on_gpu


def sdpa(q: Tensor, k: Tensor, v: Tensor, rules: Rules, documents: PackedSequences | None) -> Tensor:
    """Compute torch's scaled_dot_product_attention per document, or plain arithmetic for unsupported rules.

    Padded rows need no mask: no real token sees the padding on its right. Documents of one length are one call.
    """
    if documents is not None and len({*documents.lengths}) == 1 and rules.softcap is None and rules.sinks is None:
        count = len(documents.lengths)
        q, k, v = (t[0].unflatten(1, (count, -1)).transpose(0, 1) for t in (q, k, v))
        return _whole(q, k, v, rules).transpose(0, 1).flatten(1, 2)[None]
    return _by_document(_whole, q, k, v, rules, documents)


def plain_packed(q: Tensor, k: Tensor, v: Tensor, rules: Rules, documents: PackedSequences | None) -> Tensor:
    """Compute `plain` per document."""
    return _by_document(plain, q, k, v, rules, documents)


def _by_document(
    whole: Callable[[Tensor, Tensor, Tensor, Rules], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rules: Rules,
    documents: PackedSequences | None,
) -> Tensor:
    if documents is None or len(documents.lengths) == 1:
        return whole(q, k, v, rules)
    parts = (t.split(documents.lengths, dim=2) for t in (q, k, v))
    return torch.cat([whole(a, b, c, rules) for a, b, c in zip(*parts, strict=True)], dim=2)


def _whole(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> Tensor:
    if rules.softcap is not None or rules.sinks is not None:
        return plain(q, k, v, rules)
    mask = allowed(q.shape[2], rules, q.device) if rules.window is not None and q.shape[2] > rules.window else None
    if on_gpu(q.device) and not shares_heads(q, v, masked=mask is not None, ampere=is_ampere(q.device)):
        k, v = own_heads(q, k), own_heads(q, v)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=rules.dropout,
        is_causal=rules.causal and mask is None,
        scale=rules.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def shares_heads(q: Tensor, v: Tensor, *, masked: bool, ampere: bool) -> bool:
    """Return whether a fused kernel of torch on a GPU takes fewer heads of keys and values than of queries.

    Its flash kernel does. Where that is not used, shared heads would fall back to plain arithmetic with S x S scores,
    and the memory-efficient kernel takes them repeated.
    """
    size, dtype = q.shape[-1], autocast_dtype(q)
    return ampere and not masked and dtype in HALVES and size == v.shape[-1] <= MAX_HEAD_SIZE


def own_heads(q: Tensor, shared: Tensor) -> Tensor:
    """Return keys or values repeated for each query head."""
    times = q.shape[1] // shared.shape[1]
    return shared if times == 1 else shared.repeat_interleave(times, dim=1)


def plain(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> Tensor:
    """Compute attention by definition, in the input dtype with a float32 softmax: the reference of every backend."""
    scale = q.shape[-1] ** -0.5 if rules.scale is None else rules.scale
    scores = _grouped_matmul(q, k.transpose(-1, -2)) * scale
    if rules.softcap is not None:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    mask = allowed(q.shape[2], rules, q.device)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if rules.sinks is not None:
        sinks = rules.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores.float(), dim=-1).to(v.dtype)[..., : k.shape[2]]
    return _grouped_matmul(F.dropout(weights, rules.dropout), v)


def _grouped_matmul(per_query_head: Tensor, per_key_head: Tensor) -> Tensor:
    """Multiply with the query heads of a key head stacked: broadcasting would copy keys and values for each."""
    batch, heads, size, _ = per_query_head.shape
    stacked = per_query_head.reshape(batch, per_key_head.shape[1], -1, per_query_head.shape[3])
    return torch.matmul(stacked, per_key_head).reshape(batch, heads, size, -1)


def allowed(size: int, rules: Rules, device: torch.device) -> Tensor:
    """Return [S, S], true where the query of a row may see the key of a column."""
    places = torch.arange(size, device=device)
    distance = places[:, None] - places[None, :]
    seen = distance >= 0 if rules.causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if rules.window is None else seen & (distance.abs() < rules.window)


_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def compiled_sdpa(q: Tensor, k: Tensor, v: Tensor, rules: Rules, documents: PackedSequences | None) -> Tensor:
    """Compute `sdpa` as one operation, without soft-capping, sinks or dropout if document lengths differ."""
    if documents is None or documents.are_longest(q.shape[2]) or q.device.type != "cpu":
        return sdpa(q, k, v, rules, documents)
    require_rules("sdpa", rules)
    if v.shape[-1] != q.shape[-1]:
        raise ConfigError(cannot("sdpa", ["keys and values of different sizes in a compiled layer"]))
    dtype = autocast_dtype(v)
    window = rules.window if rules.window is not None and rules.window < documents.max_seqlen else None
    out: Tensor = _split(
        q.to(dtype), k.to(dtype), v.to(dtype), documents.cu_seqlens, rules.causal, rules.scale, window
    )[0]
    return out


@torch.library.custom_op("app::split_attention", mutates_args=())
def _split(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, causal: bool, scale: float | None, window: int | None
) -> tuple[Tensor, Tensor]:
    parts = [
        _FORWARD(q[part], k[part], v[part], 0.0, causal and mask is None, attn_mask=mask, scale=scale)
        for part, mask in _parts(q, bounds, causal, window)
    ]
    out, sums = (torch.cat(tensors, dim=2).contiguous() for tensors in zip(*parts, strict=True))
    return out, sums


@_split.register_fake
def _split_shapes(
    q: Tensor, _k: Tensor, _v: Tensor, _bounds: Tensor, _causal: bool, _scale: float | None, _window: int | None
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("app::split_attention_backward", mutates_args=())
def _back(  # noqa: PLR0913, PLR0917  all inputs of the forward pass
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    bounds: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    parts = []
    for part, mask in _parts(q, bounds, causal, window):
        inputs = (tensor[part] for tensor in (grad, q, k, v, out, sums))
        parts.append(_BACKWARD(*inputs, 0.0, causal and mask is None, attn_mask=mask, scale=scale))
    dq, dk, dv = (torch.cat(tensors, dim=2).contiguous() for tensors in zip(*parts, strict=True))
    return dq, dk, dv


@_back.register_fake
def _back_shapes(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_more: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# FLOPs are unknown: they depend on document lengths. Bytes are the parts before they are joined.
COSTS["app::split_attention"] = OperationCost(cpu_bytes=lambda q, *_: q.nbytes + 4 * q[..., 0].numel())
COSTS["app::split_attention_backward"] = OperationCost(cpu_bytes=lambda _, q, k, v, *__: q.nbytes + k.nbytes + v.nbytes)


def _parts(
    q: Tensor, bounds: Tensor, causal: bool, window: int | None
) -> Iterator[tuple[tuple[slice, slice, slice], Tensor | None]]:
    """Yield the slices of each document in [B, H, T, ...], with the mask of its window."""
    everything = slice(None)
    for start, end in pairwise(bounds.tolist()):
        length = end - start
        if not length:
            continue
        mask = None
        if window is not None and length > window:
            seen = allowed(length, Rules(causal, None, 0.0, window, None, None), q.device)
            mask = torch.zeros(length, length, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
        yield (everything, everything, slice(start, end)), mask


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bounds, *ctx.rules = inputs
    ctx.save_for_backward(q, k, v, *output, bounds)


def _gradients(ctx: Any, grad: Tensor, _of_sums: Tensor) -> tuple[Tensor | None, ...]:
    return (*_back(grad, *ctx.saved_tensors, *ctx.rules), None, None, None, None)


_split.register_autograd(_gradients, setup_context=_keep)
