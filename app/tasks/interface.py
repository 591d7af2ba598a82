"""Interface of a task: labels of rows, loss, sums for metrics, and answers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from app.batch import Batch
from app.config.kinds import METRICS
from app.config.schema import PreferenceConfig, RunConfig, TaskConfig
from app.data.objectives import Objective
from app.data.token_dataset import TokenRows
from app.data.tokenizer import Tokenizer
from app.model.losses import Loss
from app.model.training_model import TrainingModel
from app.tracking.formatting import Sample

Sums = NDArray[np.float64]  # [..., NUM_BASIC and task columns] of each row, or a sum of rows
Metrics = Mapping[str, NDArray[np.float64]]
LOSS, LABELS, HITS, ANSWERS, EXACT, WEIGHT = range(6)  # all but losses and weights are counts
NUM_BASIC = 6


def _no_columns(batch: Batch, losses: Tensor, _predictions: Tensor) -> Tensor:
    return losses.new_zeros(len(batch.documents_of_rows), 0)


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums over the rows of a task, and the metrics computed from them."""

    ratios: Mapping[str, tuple[int, int]]  # metrics that are one column over another, with error margins
    others: Callable[[Sums], Metrics] = lambda _: {}
    answers: bool = False  # whether to count exact matches of whole answers
    # [rows, num_task_columns], from losses and predicted labels
    task_columns: Callable[[Batch, Tensor, Tensor], Tensor] = _no_columns
    num_task_columns: int = 0  # columns after the first six
    of_all: Callable[[Sums], Sums] | None = None  # adds columns that need all rows, such as ranks

    def metrics(self, sums: Sums) -> dict[str, NDArray[np.float64]]:
        """Return metrics from sums; NaN if the denominator is 0, such as exact match without answers."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratios = {name: sums[..., top] / sums[..., below] for name, (top, below) in self.ratios.items()}
            metrics = {**ratios, **self.others(sums)}
        return {name: metrics[name] for name in sorted(metrics, key=[*METRICS].index)}


@dataclass(frozen=True, slots=True)
class HeldOutRows:
    """Rows of the eval set with the inputs for answering them."""

    rows: TokenRows
    indices: list[int]
    objective: Objective
    tokenizer: Any
    max_new_tokens: int

    def text(self, ids: Any) -> str:
        """Decode without special tokens."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


@dataclass(frozen=True, slots=True)
class Implementation:
    """Code of a task; its facts are in `app.config.tasks.Task`."""

    objective: Callable[[TaskConfig, Tokenizer, int, bool], Objective]  # also seed and bidirectional attention
    loss: Callable[[TaskConfig, PreferenceConfig], Loss]
    counts: Callable[[RunConfig], Counts]
    answers: Callable[[HeldOutRows, TrainingModel], list[Sample]]
    # upper bound of the number of labels, from tokens and documents; loss masks are only known from the data
    most_labels: Callable[[TaskConfig, int, int], int] = lambda _config, tokens, _documents: tokens
