"""The attention function that every supported transformers model calls, and its backends.

Registered under our own name, transformers builds no mask for it and passes `documents` through: those packed in a
row, or None if each row is one document followed by padding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from app.batch import PackedSequences
from app.config.kinds import OWN
from app.config.schema import AttentionConfig
from app.errors import ConfigError
from app.layers.attention.exchange import by_heads
from app.layers.attention.requirements import Kernel, Needs, Rules, cannot, is_capped, refusals
from app.layers.attention.sdpa import compiled_sdpa, sdpa
from app.layers.attention.varlen import varlen_on, varlen_requires

# a name with "flash" or "/" would be looked up as a hub kernel
NAME = "packed"


def register(backend: str, compiled_on: torch.device | None = None) -> str:
    """Register `backend` and return its name for loading models; `compiled_on`: the device of compiled layers.

    The model's own attention is not a backend: it is not replaced.
    """
    if backend == OWN:
        return OWN
    chosen = BACKENDS[backend]
    if compiled_on is None or chosen.compiled is None:
        return register_kernel(chosen.run, NAME)
    return register_kernel(chosen.compiled(compiled_on), NAME)


def register_kernel(kernel: Kernel, name: str) -> str:
    """Register `kernel` for models that are built with `name`."""
    from transformers import AttentionInterface

    def attention(  # noqa: PLR0913, PLR0917  the signature in transformers
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
        if documents is not None and documents.exchange is not None:
            out = by_heads(kernel, query, key, value, rules, documents)
        elif documents is None or query.shape[0] == 1:
            out = kernel(query, key, value, rules, documents)
        else:
            q, k, v = (states.transpose(0, 1).flatten(1, 2)[None] for states in (query, key, value))  # as one row
            out = kernel(q, k, v, rules, documents)[0]
            out = out.reshape(out.shape[0], query.shape[0], -1, out.shape[2]).transpose(0, 1)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, attention)
    return name


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to compute attention.

    `run` takes [B, H, S, D] (fewer heads for keys and values where they are shared) and returns the shape of its
    queries: the documents of a packed row (B is 1), or padded rows if there are none. `requires` returns what this
    machine lacks, `refuses` the unsupported needs of a run. Without `refuses` it is correct for every model. `compiled`
    returns the kernel of compiled layers: it reads only values of `PackedSequences` that are equal in all batches.
    """

    run: Kernel
    requires: Callable[[torch.device], list[str]]
    refuses: Callable[[Needs], list[str]] | None = None
    compiled: Callable[[torch.device], Kernel] | None = None


def _varlen(name: str, *, softcap: bool) -> Backend:
    kernel_on = partial(varlen_on, name)

    def run(q: Tensor, k: Tensor, v: Tensor, rules: Rules, documents: PackedSequences | None) -> Tensor:
        return kernel_on(q.device)(q, k, v, rules, documents)

    return Backend(run, partial(varlen_requires, name), partial(refusals, softcap=softcap), kernel_on)


# `auto` takes the first that supports everything, for all layers
BACKENDS: dict[str, Backend] = {
    "flash": _varlen("flash", softcap=True),
    "varlen": _varlen("varlen", softcap=False),
    "sdpa": Backend(sdpa, lambda _device: [], compiled=lambda _device: compiled_sdpa),
}


def select(config: AttentionConfig, device: torch.device, needs: Callable[[], Needs], *, traces: bool = False) -> str:
    """Return the backend name of this run. `needs` builds a model on meta, so it is called only if required.

    `traces`: `auto` selects a backend with a kernel for compiled layers.
    """
    if config.kind == "auto":
        able = (name for name, backend in BACKENDS.items() if backend.compiled or not traces)
        return next(name for name in able if _problem(name, device, needs) is None)
    problem = None if config.kind == OWN else _problem(config.kind, device, needs)
    if problem is not None:
        raise ConfigError(problem)
    return config.kind


def _problem(name: str, device: torch.device, needs: Callable[[], Needs]) -> str | None:
    backend = BACKENDS[name]
    missing = backend.requires(device)
    if missing:
        return f"attention={name} needs {' and '.join(missing)}. Set attention=sdpa."
    unsupported = [] if backend.refuses is None else backend.refuses(needs())
    return cannot(name, unsupported) if unsupported else None


def own_attention(lm: Any) -> str:
    """Return the fastest implementation of transformers that is correct for `lm`, where ours is not used.

    Ours has no key-value cache. Their sdpa has no sinks, and silently skips soft-capping (5.17).
    """
    return "sdpa" if lm._supports_sdpa and not is_capped(lm) else "eager"
