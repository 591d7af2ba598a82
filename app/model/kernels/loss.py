"""Logits turned into losses, and in the same memory into the gradients of these losses."""

from typing import Any

import torch
from torch import Tensor

from app.batch import IGNORE
from app.model.kernels import taken_by

# Of logits that the plain arithmetic has in float32 at once: on a CPU what its caches hold
_PIECE_BYTES = {"cpu": 1 << 20}
_ELSEWHERE = 64 << 20
_BESIDE = 16  # bytes for each row: targets and factors

_OPS = torch.library.Library("app_kernels", "FRAGMENT")
_OPS.define(
    "spend_logits(Tensor(a!) logits, Tensor targets, Tensor? weights, Tensor(b!) losses, bool gradient, bool kernel)"
    " -> ()"
)


def spend(logits: Tensor, targets: Tensor, weights: Tensor | None, *, gradient: bool, kernel: bool) -> Tensor:
    """Of each row its cross-entropy times its weight, in float32; 0 for IGNORE. `logits` [n, vocabulary] are spent.

    With `gradient` they are the gradient of the sum of these losses afterwards.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    kernel = kernel and taken_by(logits.device)
    torch.ops.app_kernels.spend_logits(logits, targets, weights, losses, gradient, kernel)
    return losses


def spend_plain(
    logits: Tensor, targets: Tensor, weights: Tensor | None, losses: Tensor, *, gradient: bool
) -> None:
    """A few rows at a time. Whatever `logits` are, it is computed in float32 and rounded once."""
    counts = targets != IGNORE
    factors = counts.float() if weights is None else weights * counts
    wanted = targets.clamp_min(0)[:, None]
    rows = max(1, _piece_bytes(logits) // (4 * logits.shape[1]))
    for start in range(0, len(logits), rows):
        part = slice(start, start + rows)
        exact, factor = logits[part].float(), factors[part, None]
        largest = exact.amax(1, keepdim=True)
        loss = largest - exact.gather(1, wanted[part])
        total = exact.sub_(largest).exp_().sum(1, keepdim=True)
        losses[part] = (loss.add_(total.log()) * factor)[:, 0]
        if gradient:
            exact.mul_(factor / total).scatter_add_(1, wanted[part], -factor)
            if exact.dtype != logits.dtype:
                logits[part] = exact


def _piece_bytes(logits: Tensor) -> int:
    return _PIECE_BYTES.get(logits.device.type, _ELSEWHERE)


def hidden(logits: Tensor, _targets: Any, _weights: Any, _losses: Any, _gradient: bool, kernel: bool) -> int:
    """Bytes that are gone when it returns."""
    if kernel:
        return 0
    copied = 0 if logits.dtype == torch.float32 else min(_piece_bytes(logits), 4 * logits.numel())
    return copied + _BESIDE * len(logits)


def _spent(
    logits: Tensor, targets: Tensor, weights: Tensor | None, losses: Tensor, gradient: bool, kernel: bool
) -> None:
    if kernel and logits.is_cuda:
        from app.model.kernels.loss_triton import spend as launched

        launched(logits, targets, weights, losses, gradient=gradient)
    else:
        spend_plain(logits, targets, weights, losses, gradient=gradient)


_OPS.impl("spend_logits", _spent, "CPU")
_OPS.impl("spend_logits", _spent, "CUDA")
torch.library.register_fake("app_kernels::spend_logits", lambda *_given: None, lib=_OPS)
