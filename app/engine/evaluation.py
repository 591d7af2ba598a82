"""How good a model is on rows: sums over counts, the same for any batch size, packing, order or number of processes."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from app.batch import Batch
from app.engine.runtime import Runtime
from app.model.trainee import Trainee
from app.record.metrics import finite_or_none


@dataclass(frozen=True, slots=True)
class Scores:
    """Of all trained tokens of all rows."""

    loss: float  # the mean, in nats
    token_accuracy: float  # the share that the model would have chosen, all before it being given

    @property
    def perplexity(self) -> float:
        """Infinity where a float64 ends."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def as_dict(self) -> dict[str, float | None]:
        """For json, which has neither infinity nor NaN."""
        known = {"eval_loss": self.loss, "perplexity": self.perplexity, "token_accuracy": self.token_accuracy}
        return {key: finite_or_none(value) for key, value in known.items()}

    def words(self) -> str:
        """For people."""
        return f"loss {self.loss:.4f} | perplexity {self.perplexity:.4g} | token accuracy {self.token_accuracy:.2%}"


def score(trainee: Trainee, batches: Iterable[Batch], runtime: Runtime) -> Scores:
    """Over the batches of all processes. Sums are float64, and divided once."""
    loss = torch.zeros((), dtype=torch.float64, device=runtime.device)
    hits = torch.zeros((), dtype=torch.int64, device=runtime.device)
    labels = 0
    mode = trainee.training
    trainee.eval()
    try:
        for batch in batches:
            losses, right = trainee.scores(batch.to(runtime.device))
            loss += losses.double().sum()
            hits += right.sum()
            labels += batch.num_labels
    finally:
        trainee.train(mode)
    loss_sum, hits_sum, count = runtime.peers.totals([loss.item(), hits.item(), labels])
    return Scores(loss_sum / max(count, 1.0), hits_sum / max(count, 1.0))


def mean_loss(trainee: Trainee, batches: Iterable[Batch], runtime: Runtime) -> float:
    """What an evaluation during training reports."""
    return score(trainee, batches, runtime).loss
