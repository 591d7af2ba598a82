"""Attention as one function of ours that every supported transformers model calls, over a table of backends.

Registered under a name of our own, transformers builds no mask for it and passes `documents` through: the lengths
of the documents that lie side by side in a row, or None when each row is one document followed by padding. Causal
rows need no mask for padding on the right: no real token looks at it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from app.config.schema import AttentionConfig
from app.errors import ConfigError

# a name with "flash" or "/" in it would be looked up as a kernel of the hub
NAME = "packed"


@dataclass(frozen=True, slots=True)
class Rules:
    """What a layer asks for besides q, k and v."""

    causal: bool
    scale: float | None
    dropout: float
    window: int | None  # tokens each side of the query may see, itself included
    softcap: float | None
    sinks: Tensor | None  # one logit per head that takes part in the softmax and is thrown away


Kernel = Callable[[Tensor, Tensor, Tensor, Rules], Tensor]


@dataclass(frozen=True, slots=True)
class Backend:
    """`run` takes [B, H, S, D] of whole documents; `requires` says what is missing here, in words."""

    run: Kernel
    requires: Callable[[torch.device], list[str]]


def sdpa(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> Tensor:
    """torch's scaled_dot_product_attention, or plain arithmetic for what it cannot do."""
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


BACKENDS: dict[str, Backend] = {
    "sdpa": Backend(run=sdpa, requires=lambda _device: []),
}
_PREFERRED = ("sdpa",)  # `auto` takes the first whose needs are met


def select(config: AttentionConfig, device: torch.device) -> str:
    """The backend of this run, by name."""
    if config.kind == "auto":
        return next(name for name in _PREFERRED if not BACKENDS[name].requires(device))
    missing = BACKENDS[config.kind].requires(device)
    if missing:
        raise ConfigError(f"attention={config.kind} needs {' and '.join(missing)}. Set attention=auto.")
    return config.kind


def register(backend: str) -> str:
    """Make `backend` what models call, and return the name to load them with."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _as_transformers_calls_it(BACKENDS[backend].run))
    return NAME


def _as_transformers_calls_it(kernel: Kernel) -> Callable[..., tuple[Tensor, None]]:
    def attention(  # noqa: PLR0913, PLR0917  how transformers calls it
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG001  none is ever built for our name
        dropout: float = 0.0,
        scaling: float | None = None,
        documents: tuple[int, ...] | None = None,
        **layer: Any,
    ) -> tuple[Tensor, None]:
        causal = layer.get("is_causal")
        rules = Rules(
            causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
            scale=scaling,
            dropout=dropout if module.training else 0.0,
            window=layer.get("sliding_window"),
            softcap=layer.get("softcap"),
            sinks=layer.get("s_aux"),
        )
        pieces = [kernel(q, k, v, rules) for q, k, v in _by_document(query, key, value, documents)]
        out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
        return out.transpose(1, 2).contiguous(), None

    return attention


def _by_document(
    q: Tensor, k: Tensor, v: Tensor, documents: tuple[int, ...] | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    if documents is None or len(documents) == 1:
        yield q, k, v
    else:
        yield from zip(*(t.split(documents, dim=2) for t in (q, k, v)), strict=True)
