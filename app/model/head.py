"""Logits and cross-entropy for labelled rows only, in chunks of bounded size.

The logits come from the model's own forward with its backbone replaced by the rows, so that whatever a kind
does around its head (soft-capping, scaling, a transform) stays right. Gradients are made in the forward pass,
chunk by chunk: no more than one chunk of logits is ever alive.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from app.batch import IGNORE

Head = Callable[[Tensor], Tensor]  # [n, hidden] -> [n, vocabulary]

_CHUNK_BYTES = 256 << 20
_COPIES = 3  # of the logits in float32: themselves, their softmax, their gradient
_LEAST_ROWS = 512  # smaller chunks were up to 3.5 times slower than one piece


def own_head(lm: Any) -> Head:
    """The head of a transformers model as a function of hidden states."""
    prefix: str = lm.base_model_prefix

    def head(rows: Tensor) -> Tensor:
        stub = Given(rows[None])
        lm.__dict__[prefix] = (
            stub  # setattr would refuse a non-module; an instance attribute wins over the module
        )
        try:
            logits: Tensor = lm(input_ids=None, use_cache=False).logits
        finally:
            del lm.__dict__[prefix]
        return logits[0]

    return head


class Given:
    """Stands in for the backbone and for its output: the hidden states it was made with, None for all else.

    Kinds ask for what the others do not have: router logits, cross attentions, a decoder inside the backbone.
    """

    def __init__(self, hidden: Tensor, pooled: Tensor | None = None) -> None:
        self.last_hidden_state = hidden
        self._parts = (hidden,) if pooled is None else (hidden, pooled)

    @property
    def decoder(self) -> "Given":
        """No attribute: a cycle would keep the rows until Python looks for cycles."""
        return self

    def __call__(self, *_args: Any, **_kwargs: Any) -> "Given":
        """Whatever it is asked."""
        return self

    def __getitem__(self, index: int) -> Tensor:
        return self._parts[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def is_of_backbone(lm: Any, name: str) -> bool:
    """Whether a module or weight of this name is no part of the head; a pooler inside the backbone is."""
    inside = f"{lm.base_model_prefix}."
    return name.startswith(inside) and name.removeprefix(inside).partition(".")[0] != "pooler"


def head_parameters(lm: Any) -> list[nn.Parameter]:
    """The trained parameters outside the backbone, each once; a head tied to the embedding counts."""
    named = lm.named_parameters(remove_duplicate=False)
    outside = {id(p): p for name, p in named if not is_of_backbone(lm, name) and p.requires_grad}
    return list(outside.values())


def chunk_rows(vocabulary: int) -> int:
    """How many rows go through the head at once."""
    return max(_LEAST_ROWS, _CHUNK_BYTES // (_COPIES * 4 * vocabulary))


def token_loss_sum(
    head: Head,
    rows: Tensor,
    targets: Tensor,
    parameters: list[nn.Parameter],
    chunk: int,
    weights: Tensor | None = None,
) -> Tensor:
    """The sum of cross-entropies over all targets that are not IGNORE, each times its weight, in float32."""
    with for_trained_head(rows, parameters) as given:
        loss: Tensor = _ChunkedLoss.apply(head, chunk, targets, weights, given, *parameters)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def token_scores(
    head: Head, rows: Tensor, targets: Tensor, parameters: list[nn.Parameter], chunk: int
) -> tuple[Tensor, Tensor]:
    """Of each target its cross-entropy in float32, 0 for IGNORE, and the token of the largest logit."""
    losses = torch.empty(targets.shape, dtype=torch.float32, device=rows.device)
    chosen = torch.empty(targets.shape, dtype=torch.long, device=rows.device)
    with for_trained_head(rows, parameters) as given:
        for start in range(0, given.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = head(given[part]).float()
            losses[part] = F.cross_entropy(logits, targets[part], ignore_index=IGNORE, reduction="none")
            chosen[part] = logits.argmax(-1)
            del logits  # or two chunks would be alive while the next is made
    return losses, chosen


@contextlib.contextmanager
def for_trained_head(rows: Tensor, parameters: list[nn.Parameter]) -> Iterator[Tensor]:
    """A trained head's gradient is a sum over all rows, made before any scale: float16 could not hold it."""
    device = rows.device.type
    if parameters and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
        with torch.autocast(device, enabled=False):
            yield rows.float()
    else:
        yield rows


def _summed(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    return (F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none") * weights).sum()


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: Head,
        chunk: int,
        targets: Tensor,
        weights: Tensor | None,
        rows: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        wants = any(ctx.needs_input_grad)
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        row_gradient = torch.empty_like(rows) if wants else None
        gradients = [torch.zeros_like(p) for p in parameters] if wants else []
        for start in range(0, rows.shape[0], chunk):
            part = slice(start, start + chunk)
            piece = rows[part].detach().requires_grad_(wants)
            with torch.set_grad_enabled(wants):
                loss = _summed(head(piece).float(), targets[part], None if weights is None else weights[part])
            total += loss.detach()
            if row_gradient is not None:
                found = torch.autograd.grad(loss, [piece, *parameters])
                row_gradient[part] = found[0]
                for gradient, new in zip(gradients, found[1:], strict=True):
                    gradient.add_(new)
        if row_gradient is not None:
            ctx.save_for_backward(row_gradient, *gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale = upstream[0]
        scaled = (
            (g.float() * scale).to(g.dtype) for g in ctx.saved_tensors
        )  # a float16 scale could overflow
        return None, None, None, None, *scaled
