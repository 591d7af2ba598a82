"""The loss and gradients of a linear head that does not keep logits, against those of the model's own head."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from app.batch import IGNORE, Batch
from app.layers.chunked_loss import LinearHead, token_loss_sum
from app.layers.comparison import Comparison, attempt, max_difference, max_or_nan
from app.layers.head import head_parameters
from app.layers.kernels import autocast_dtype, uses_kernels
from app.model.checks import first_tokens
from app.model.training_model import TrainingModel, evaluating

_LOSS_ROWS = 48
_LOSS_CHUNK = 20  # rows, so that sums over chunks are compared too
_LARGE_LOGIT = 30.0  # at which soft-capping shows
_LOSS_FP32 = 1e-5
_LOSS_ROUNDINGS = 8  # of the dtype of the arithmetic
_TF32_EPS = 2.0**-10
_LOSS = "loss and gradients of a linear head against those of the model's own"


def compare_loss_head(model: TrainingModel, head: LinearHead, batch: Batch) -> Comparison:
    """Compare loss and gradients of a linear head with those of the model's own."""
    weighted = batch.weights is not None
    with evaluating(model), torch.no_grad(), model.autocast(batch.ids.device):
        rows: Tensor = model.language_model.base_model(**first_tokens(model, batch, _LOSS_ROWS))[0][0]
    faults = Exception if uses_kernels(rows.device) else ()  # any error of a kernel's compiler
    return attempt(lambda: _compare_losses(model, head, rows, weighted=weighted), faults)


def _compare_losses(model: TrainingModel, head: LinearHead, rows: Tensor, *, weighted: bool) -> Comparison:
    with model.autocast(rows.device):
        with torch.no_grad():
            largest = model.head(rows).float().abs().max().clamp_min(1e-6)
        difference = max_or_nan(
            _loss_difference(model, head, given.to(rows.dtype), weighted=weighted)
            for given in (rows, rows.float() * (_LARGE_LOGIT / largest))
        )
        dtype = autocast_dtype(rows)
    if dtype != torch.float32:
        allowed = _LOSS_ROUNDINGS * torch.finfo(dtype).eps
    elif rows.is_cuda and torch.get_float32_matmul_precision() != "highest":
        allowed = _LOSS_ROUNDINGS * _TF32_EPS
    else:
        allowed = _LOSS_FP32
    return Comparison(_LOSS, difference, allowed)


def _loss_difference(model: TrainingModel, head: LinearHead, rows: Tensor, *, weighted: bool) -> float:
    at = torch.arange(len(rows), device=rows.device)
    targets = (at * 7919) % head.layer.out_features
    targets[3::11] = IGNORE
    weights = 1 + torch.sin(at.float()) / 2 if weighted else None
    trained = head_parameters(model.language_model)

    def outcome(loss_sum: Any) -> list[Tensor]:
        leaf = rows.detach().requires_grad_()
        with torch.enable_grad():
            loss = loss_sum(leaf)
        return [loss.detach(), *torch.autograd.grad(loss, [leaf, *trained])]

    ours = outcome(lambda given: replace(head, chunk=_LOSS_CHUNK).loss_sum(given, targets, weights))
    own = outcome(lambda given: token_loss_sum(model.head, given, targets, trained, _LOSS_CHUNK, weights))
    return max_difference(ours, own)
