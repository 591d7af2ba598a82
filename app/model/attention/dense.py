"""Attention document by document: right for every model, on any machine; and the plain definition."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from app.batch import PackedSequences
from app.model.attention.rules import Rules


def sdpa(q: Tensor, k: Tensor, v: Tensor, rules: Rules, documents: PackedSequences | None) -> Tensor:
    """torch's scaled_dot_product_attention on each document by itself, or plain arithmetic for what it cannot do.

    Padded rows need no mask: no real token looks at the padding on its right.
    """
    if documents is None or len(documents.lengths) == 1:
        return _whole(q, k, v, rules)
    parts = (t.split(documents.lengths, dim=2) for t in (q, k, v))
    return torch.cat([_whole(a, b, c, rules) for a, b, c in zip(*parts, strict=True)], dim=2)


def _whole(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> Tensor:
    if rules.softcap is not None or rules.sinks is not None:
        return plain(q, k, v, rules)
    mask = allowed(q.shape[2], rules, q.device) if _window_cuts(q.shape[2], rules) else None
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


def plain(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> Tensor:
    """The definition, in the dtype of its inputs with a float32 softmax: the reference of every backend."""
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
    """The query heads of a key head one below the other: broadcasting would copy keys and values for each."""
    batch, heads, size, _ = per_query_head.shape
    stacked = per_query_head.reshape(batch, per_key_head.shape[1], -1, per_query_head.shape[3])
    return torch.matmul(stacked, per_key_head).reshape(batch, heads, size, -1)


def allowed(size: int, rules: Rules, device: torch.device) -> Tensor:
    """[S, S] true where the query of a row may see the key of a column."""
    at = torch.arange(size, device=device)
    distance = at[:, None] - at[None, :]
    seen = distance >= 0 if rules.causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if rules.window is None else seen & (distance.abs() < rules.window)


def _window_cuts(size: int, rules: Rules) -> bool:
    return rules.window is not None and size > rules.window
