"""Sums of a row, and the metrics that come of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from app.batch import Batch
from app.config.metrics import METRICS

Sums = NDArray[np.float64]  # [..., 6 and a task's own] for each row or a sum of rows
LOSS, LABELS, HITS, ANSWERS, EXACT, WEIGHT = range(6)  # all but losses and weights are counts
NUM_BASIC = 6


def _no_columns(batch: Batch, losses: Tensor, _chosen: Tensor) -> Tensor:
    return losses.new_zeros(len(batch.documents_of_rows), 0)


@dataclass(frozen=True, slots=True)
class Counts:
    """What is summed of each row of a task, and the metrics that come of the sums."""

    ratios: Mapping[str, tuple[int, int]]  # metrics that are one column over another, with their margins
    others: Callable[[Sums], Mapping[str, NDArray[np.float64]]] = lambda _: {}
    answers: bool = False  # whether exact match of whole answers is counted
    own: Callable[[Batch, Tensor, Tensor], Tensor] = _no_columns  # [rows, num_own], from losses and choices of labels
    num_own: int = 0  # columns after the first six
    of_all: Callable[[Sums], Sums] | None = None  # adds columns that need all rows together, such as ranks

    def metrics(self, sums: Sums) -> dict[str, NDArray[np.float64]]:
        """Metrics from sums. NaN where there is nothing to divide by: rows without answers have no exact match."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratios = {name: sums[..., top] / sums[..., below] for name, (top, below) in self.ratios.items()}
            found = {**ratios, **self.others(sums)}
        return {name: found[name] for name in sorted(found, key=[*METRICS].index)}
