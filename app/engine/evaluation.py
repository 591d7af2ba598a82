"""The loss of held-out rows: a sum over a count, the same for any batch size, order or number of processes."""

from collections.abc import Iterable

import torch

from app.batch import Batch
from app.engine.runtime import Runtime
from app.model.trainee import Trainee


@torch.no_grad()
def mean_loss(trainee: Trainee, batches: Iterable[Batch], runtime: Runtime) -> float:
    """The mean over all trained tokens of all batches of all processes."""
    total = torch.zeros((), dtype=torch.float64, device=runtime.device)
    labels = 0
    trainee.eval()
    try:
        for batch in batches:
            loss, count = trainee(batch.to(runtime.device))
            total += loss.double()
            labels += count
    finally:
        trainee.train()
    loss_sum, count_all = runtime.peers.totals([total.item(), labels])
    return loss_sum / max(count_all, 1.0)
