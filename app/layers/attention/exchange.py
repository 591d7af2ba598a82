"""Attention over a row that is sliced over ranks: each rank computes some heads of all tokens."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from app.batch import PackedSequences
from app.errors import ConfigError
from app.layers.attention.requirements import Kernel, Rules
from app.layers.operations import autocast_dtype
from app.layers.recurrent import recurrent_mixers


def by_heads(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, rules: Rules, documents: PackedSequences) -> Tensor:
    """Exchange tokens for heads, run `kernel` on whole documents, and exchange back.

    Fewer key heads than ranks are repeated, so that each rank has the one of its query heads.
    """
    exchange = documents.exchange
    assert exchange is not None
    for problem in _head_problems(q.shape[1], k.shape[1], exchange.size):
        raise ConfigError(problem)
    dtype, repeats = autocast_dtype(v), max(1, exchange.size // k.shape[1])  # rotary embeddings may have widened q, k
    k, v = (states.repeat_interleave(repeats, dim=1) if repeats > 1 else states for states in (k, v))
    heads = q.shape[1] // exchange.size
    if rules.sinks is not None:
        rules = replace(rules, sinks=rules.sinks.narrow(0, exchange.index * heads, heads))
    q, k, v = (exchange.to_heads(states.to(dtype)) for states in (q, k, v))
    return exchange.to_tokens(kernel(q, k, v, rules, documents))


def exchange_problems(lm: Any, size: int, chunk: int | None = None) -> Iterator[str]:
    """Yield the reasons why rows of a model cannot be sliced over `size` ranks. `lm` may be on meta; `chunk`: tokens of
    its attention chunks, if any.
    """
    config = lm.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int):
        yield from _head_problems(heads, getattr(config, "num_key_value_heads", None) or heads, size)
    if recurrent_mixers(lm):
        yield (
            f"parallel.context={size}: recurrent and linear attention layers of {lm.config.model_type} models need all "
            "tokens of a document in order. Set parallel.context=1."
        )
    if chunk is not None:
        yield (
            f"parallel.context={size}: {lm.config.model_type} models have chunked attention (chunks of {chunk:,} "
            "tokens), which is not supported. Set parallel.context=1."
        )


def _head_problems(heads: int, key_heads: int, size: int) -> Iterator[str]:
    if heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0):
        return
    able = [n for n in range(2, heads + 1) if heads % n == 0 and (key_heads % n == 0 or n % key_heads == 0)]
    which = f"Set parallel.context to 1{''.join(f', {n}' for n in able)}."
    yield (
        f"parallel.context={size}: the model has {heads} query heads and {key_heads} key heads. Query heads must be a "
        f"multiple of parallel.context, and key heads a multiple or a divisor of it. {which}"
    )
