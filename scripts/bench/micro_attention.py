"""Every attention backend of ours on one packed row, forward and backward, and what transformers does without them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from app.batch import Documents
from app.model.attention import BACKENDS, Rules, sdpa
from scripts.bench.timing import Lines, Scale, milliseconds, rate

TOKENS, CHECKED = 16384, 512
HEADS, SHARED, SIZE = 32, 8, 128  # of Llama 8B: queries, keys and values, numbers
RULES = Rules(causal=True, scale=None, dropout=0.0, window=None, softcap=None, sinks=None)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(scale: Scale, lines: Lines) -> None:
    """Documents of up to 2,048 tokens, then one that is as long as the row."""
    tokens = scale.size(TOKENS)
    for name, lengths in {"many": lengths_in(tokens), "one": (tokens,)}.items():
        documents = Documents.of(lengths).to(scale.device)
        for backend in (*BACKENDS, "mask"):
            known = {"documents": name, "tokens": tokens, "heads": (HEADS, SHARED, SIZE)}
            lines.attempt(backend, partial(_measure, scale, backend, documents), **known)


def lengths_in(tokens: int) -> tuple[int, ...]:
    """As chats are, the last one cut off."""
    random, longest = np.random.default_rng(0), max(8, tokens // 8)
    drawn, left = [], tokens
    while left:
        length = int(np.clip(random.lognormal(np.log(longest / 4), 0.8), 8, longest))
        drawn.append(min(length, left))
        left -= drawn[-1]
    return tuple(drawn)


def _measure(scale: Scale, backend: str, documents: Documents) -> dict[str, Any]:
    attend = _attend(scale, backend, documents)
    q, k, v = _inputs(scale, int(documents.bounds[-1]), scale.dtype)
    forward = milliseconds(lambda: attend(q, k, v), scale.device)
    out = attend(q, k, v)
    upstream = torch.randn_like(out)
    backward = milliseconds(
        lambda: torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True), scale.device
    )
    pairs = sum(n * n for n in documents.lengths) / 2  # that a causal model looks at
    work = 4.0 * pairs * HEADS * SIZE
    return {
        "forward_milliseconds": forward,
        "backward_milliseconds": backward,
        "forward_tflops": rate(work, forward),
        "backward_tflops": rate(2.5 * work, backward),
        **_differences(scale, backend),
    }


def _attend(scale: Scale, backend: str, documents: Documents) -> Attend:
    """Refuses with the reason where this machine cannot."""
    if backend == "mask":
        return partial(_with_mask, mask=_mask(documents, scale.device))
    missing = BACKENDS[backend].requires(scale.device)
    if missing:
        raise RuntimeError(f"needs {' and '.join(missing)}")
    run = BACKENDS[backend].run
    return lambda q, k, v: run(q, k, v, RULES, documents)


def _mask(documents: Documents, device: torch.device) -> Tensor:
    """Which query may see which key, as transformers builds it for packed rows: the whole square."""
    of = torch.repeat_interleave(
        torch.arange(len(documents.lengths), device=device),
        torch.tensor(documents.lengths, device=device),
    )
    at = torch.arange(len(of), device=device)
    return ((of[:, None] == of[None]) & (at[:, None] >= at[None]))[None, None]


def _with_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def _inputs(scale: Scale, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (scale.random(1, heads, tokens, SIZE).to(dtype) for heads in (HEADS, SHARED, SHARED))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def _differences(scale: Scale, backend: str) -> dict[str, float]:
    """Largest relative difference of output and gradients from float64, document by document."""
    documents = Documents.of(lengths_in(scale.size(CHECKED))).to(scale.device)
    inputs = _inputs(scale, int(documents.bounds[-1]), scale.dtype)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    out = _attend(scale, backend, documents)(*inputs)
    reference = sdpa(exact[0], exact[1], exact[2], RULES, documents)
    upstream = torch.randn_like(reference)
    found = torch.autograd.grad(out, inputs, upstream.to(out.dtype))
    wanted = torch.autograd.grad(reference, exact, upstream)
    return {
        "difference": _furthest(out, reference),
        "gradient_difference": max(map(_furthest, found, wanted)),
    }


def _furthest(found: Tensor, wanted: Tensor) -> float:
    return float((found.detach().double() - wanted).abs().max() / wanted.abs().max())
