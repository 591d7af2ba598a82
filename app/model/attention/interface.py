"""The function that models call.

Registered under a name of our own, transformers builds no mask for it and passes `documents` through: those that lie
side by side in a row, or None when each row is one document followed by padding.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from app.batch import PackedSequences
from app.model.attention.backends import BACKENDS
from app.model.attention.rules import Kernel, Rules

# a name with "flash" or "/" in it would be looked up as a kernel of the hub
NAME = "packed"


def register(backend: str, compiled_on: torch.device | None = None) -> str:
    """Make `backend` what models call, and return the name to load them with. `compiled_on`: their layers are."""
    chosen = BACKENDS[backend]
    if compiled_on is None or chosen.traced is None:
        return register_kernel(chosen.run, NAME)
    return register_kernel(chosen.traced(compiled_on), NAME)


def register_kernel(kernel: Kernel, name: str) -> str:
    """Make `kernel` what models call that are made with `name`."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, _as_transformers_calls_it(kernel))
    return name


def _as_transformers_calls_it(kernel: Kernel) -> Callable[..., tuple[Tensor, None]]:
    def attention(  # noqa: PLR0913, PLR0917  how transformers calls it
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG001  none is ever built for our name
        dropout: float = 0.0,
        scaling: float | None = None,
        documents: PackedSequences | None = None,
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
        if documents is None or query.shape[0] == 1:
            out = kernel(query, key, value, rules, documents)
        else:
            out = _in_one_row(kernel, query, key, value, rules, documents)
        return out.transpose(1, 2).contiguous(), None

    return attention


def _in_one_row(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, rules: Rules, documents: PackedSequences
) -> Tensor:
    """Documents that lie in several rows, one row after another."""
    rows = q.shape[0]
    q, k, v = (t.transpose(0, 1).flatten(1, 2)[None] for t in (q, k, v))
    out = kernel(q, k, v, rules, documents)[0]
    return out.reshape(out.shape[0], rows, -1, out.shape[2]).transpose(0, 1)
