"""Graphs of compiled layers are made and held against the layers' own forward, before the first step."""

from typing import Any

import torch
from torch import Tensor

from app.batch import Batch
from app.model.compiling import Blocks, gist, timed
from app.model.proof import Proof
from app.model.trainee import Trainee

_EXACT = 1e-4  # of the gradient's norm, in float32
_ROUNDINGS = 8  # of the dtype that is computed in


def settle(trainee: Trainee, blocks: Blocks, batch: Batch) -> Proof | None:
    """Loss and gradient of `batch`, once compiled and once not; where they differ, or nothing can be compiled, the run
    goes on without. None: there is nothing to compare.
    """
    with blocks.paused():
        own = _outcome(trainee, batch)
    try:
        timed(blocks, lambda: _outcome(trainee, batch))
        ours = _outcome(trainee, batch)  # as all later ones: without a graph being made
    except RuntimeError as fault:  # of any stage of the compiler, and of what it made
        blocks.give_up(f"the compiler cannot do this model ({gist(fault)})")
        return None
    blocks.settled = True
    found = max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(ours, own, strict=True))
    compute = trainee.compute
    allowed = _EXACT if compute is None else _ROUNDINGS * torch.finfo(compute).eps
    proof = Proof("loss and gradient of compiled layers against their own", found, allowed)
    if not proof.holds:
        blocks.give_up(f"compiled layers differ by {found:.1e} (allowed {allowed:.1e})")
        return None
    return proof


def _outcome(trainee: Trainee, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss, and the gradients of all that is trained. The run's random numbers stay as they are."""
    device = batch.ids.device
    devices: Any = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        loss, _ = trainee(batch)
        mean = loss / (batch.label_weight or 1.0)
        found = torch.autograd.grad(mean, list(trainee.trained().values()), allow_unused=True)
    parts = [each.flatten().float() for each in found if each is not None]
    return loss.detach().float(), torch.cat(parts)
