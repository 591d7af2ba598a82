"""Whether the way of a linear head gives the losses and gradients of the general way, before the first step.

Rows are tried as they come from the backbone and so large that a head which bends its logits shows it.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from app.batch import IGNORE, Batch
from app.model.head import head_parameters, token_loss_sum
from app.model.linear_head import LinearHead, linear_head
from app.model.proof import Proof, furthest, worst
from app.model.trainee import Trainee

_ROWS = 48
_CHUNK = 20  # so that sums over chunks are proven too
_LARGE = 30.0  # logits at which soft-capping shows
_EXACT = 1e-5
_ROUNDINGS = 8  # of the dtype that is computed in
_TF32 = 2.0**-10

LINEAR = "loss and gradients of a linear head against those of the model's own"


@dataclass(frozen=True, slots=True)
class SettledHead:
    """None: the model's own head, for whatever it does."""

    linear: LinearHead | None
    proofs: tuple[Proof, ...] = ()
    remarks: tuple[str, ...] = ()


def settle_head(trainee: Trainee, batch: Batch) -> list[Proof]:
    """Let the trainee take the faster way where it is proven; its proofs."""
    settled = SettledHead(None) if trainee.pooled else _settled(trainee, batch)
    trainee.linear = settled.linear
    trainee.head_remarks = settled.remarks
    return list(settled.proofs)


def _settled(trainee: Trainee, batch: Batch) -> SettledHead:
    head = linear_head(trainee.language_model)
    if head is None:
        return SettledHead(None)
    rows, weighted = _rows(trainee, batch), batch.weights is not None
    ways = {"the model's own way": head.without_kernel()}
    if head.uses_kernel(rows.device):
        ways = {"its plain arithmetic": head, **ways}
    remarks: list[str] = []
    for instead, way in ways.items():
        proof, fault = _tried(trainee, way, rows, weighted=weighted)
        if proof.holds:
            return SettledHead(way, (proof,), tuple(remarks))
        found = fault or f"it differs by {proof.difference:.1e} (allowed {proof.allowed:.1e})"
        remarks.append(f"loss head: {instead} is taken for the faster one: {found}")
    return SettledHead(None, (), tuple(remarks))


def _rows(trainee: Trainee, batch: Batch) -> Tensor:
    """Hidden states of the first tokens."""
    lm, mode = trainee.language_model, trainee.training
    trainee.eval()
    with torch.no_grad(), trainee.arithmetic(batch.ids.device):
        positions = batch.positions[:1, :_ROWS] + trainee.first_position
        hidden = lm.base_model(input_ids=batch.ids[:1, :_ROWS], position_ids=positions, use_cache=False)[0][0]
    trainee.train(mode)
    result: Tensor = hidden
    return result


def _tried(trainee: Trainee, head: LinearHead, rows: Tensor, *, weighted: bool) -> tuple[Proof, str]:
    """A kernel that cannot be made here is no reason to stop."""
    nothing = Proof(LINEAR, float("inf"), 0.0)
    try:
        return _proof(trainee, head, rows, weighted=weighted), ""
    except Exception as fault:
        if not head.uses_kernel(rows.device):
            raise
        return nothing, f"{type(fault).__name__}: {str(fault).strip().partition(chr(10))[0][:200]}"


def _proof(trainee: Trainee, head: LinearHead, rows: Tensor, *, weighted: bool) -> Proof:
    with trainee.arithmetic(rows.device):
        with torch.no_grad():
            largest = trainee.head(rows).float().abs().max().clamp_min(1e-6)
        apart = worst(
            _difference(trainee, head, given.to(rows.dtype), weighted=weighted)
            for given in (rows, rows.float() * (_LARGE / largest))
        )
        kind = rows.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
    return Proof(LINEAR, apart, _allowed(dtype, kind))


def _allowed(dtype: torch.dtype, kind: str) -> float:
    if dtype != torch.float32:
        return _ROUNDINGS * torch.finfo(dtype).eps
    rounds = kind == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return _ROUNDINGS * _TF32 if rounds else _EXACT


def _difference(trainee: Trainee, head: LinearHead, rows: Tensor, *, weighted: bool) -> float:
    """The largest relative one, of loss and gradients."""
    places = torch.arange(len(rows), device=rows.device)
    targets = (places * 7919) % head.layer.out_features
    targets[3::11] = IGNORE
    weights = 1 + torch.sin(places.float()) / 2 if weighted else None
    trained = head_parameters(trainee.language_model)
    ways: list[Any] = [
        lambda given: token_loss_sum(trainee.head, given, targets, trained, _CHUNK, weights),
        lambda given: replace(head, chunk=_CHUNK).loss_sum(given, targets, weights),
    ]
    own, ours = (_outcome(way, rows, trained) for way in ways)
    return furthest(ours, own)


def _outcome(way: Any, rows: Tensor, trained: list[nn.Parameter]) -> list[Tensor]:
    leaf = rows.detach().requires_grad_()
    with torch.enable_grad():
        loss = way(leaf)
    return [loss.detach(), *torch.autograd.grad(loss, [leaf, *trained])]
