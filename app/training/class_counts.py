"""What is counted of answers with labels or numbers: F1 of classes, errors and correlations of numbers."""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.batch import Batch
from app.config.schema import RunConfig
from app.training.counts import HITS, LABELS, LOSS, NUM_BASIC, WEIGHT, Counts, Sums

Metrics = Mapping[str, NDArray[np.float64]]


def _count_single(run: RunConfig) -> Counts:
    ratios, classes = {"eval_loss": (LOSS, WEIGHT), "accuracy": (HITS, LABELS)}, len(run.task.labels)
    return Counts(ratios, macro_f1, own=partial(occurrences, classes), num_own=3 * classes)


def occurrences(classes: int, batch: Batch, _losses: Tensor, chosen: Tensor) -> Tensor:
    """Whether each class is true, predicted or both, by label."""
    names = torch.arange(classes, device=chosen.device)
    true, predicted = (each[: batch.num_labels, None] == names for each in (batch.targets, chosen))
    return torch.cat([true, predicted, true & predicted], dim=1)


def macro_f1(sums: Sums) -> Metrics:
    """The mean F1 of all classes that are true or were predicted at least once."""
    true, predicted, both = np.split(sums[..., NUM_BASIC:], 3, axis=-1)
    occurrences = true + predicted
    f1 = np.divide(2 * both, occurrences, out=np.zeros_like(both), where=occurrences > 0)
    return {"macro_f1": f1.sum(axis=-1) / (occurrences > 0).sum(axis=-1)}


def _count_multi(run: RunConfig) -> Counts:
    ratios, classes = {"eval_loss": (LOSS, WEIGHT), "accuracy": (HITS, LABELS)}, len(run.task.labels)
    return Counts(ratios, _both_f1, own=_labels, num_own=3 * classes)


def _labels(batch: Batch, _losses: Tensor, chosen: Tensor) -> Tensor:
    """Whether each label is true, predicted or both, by document."""
    true, predicted = (each[: batch.num_labels].bool() for each in (batch.targets, chosen))
    return torch.cat([true, predicted, true & predicted], dim=1)


def _both_f1(sums: Sums) -> Metrics:
    true, predicted, both = (part.sum(axis=-1) for part in np.split(sums[..., NUM_BASIC:], 3, axis=-1))
    return {**macro_f1(sums), "micro_f1": 2 * both / (true + predicted)}


_MOMENTS = 5  # sums of two numbers, of their squares and of their product


def _count_numbers(run: RunConfig) -> Counts:
    outputs, error = len(run.task.labels), NUM_BASIC
    return Counts(
        {"eval_loss": (LOSS, WEIGHT), "mae": (error, LABELS)},
        partial(_correlations, outputs),
        own=_compared,
        num_own=1 + _MOMENTS * outputs,
        of_all=partial(_with_ranks, outputs),
    )


def _compared(batch: Batch, _losses: Tensor, chosen: Tensor) -> Tensor:
    """The mean absolute error of each document, and the moments of true and predicted numbers."""
    true, found = (each[: batch.num_labels].double() for each in (batch.targets, chosen))
    error = (true - found).abs().mean(dim=1, keepdim=True)
    return torch.cat([error, true, found, true.square(), found.square(), true * found], dim=1)


def _with_ranks(outputs: int, rows: Sums) -> Sums:
    """Append the moments of ranks; equal numbers share the mean of their ranks."""
    true, found = (rows[:, NUM_BASIC + 1 + side * outputs :][:, :outputs] for side in (0, 1))
    ranks = [np.stack([_ranks(column) for column in side.T], axis=1) for side in (true, found)]
    ordered = [each - (len(rows) + 1) / 2 for each in ranks]
    return np.hstack([rows, *ordered, *(each**2 for each in ordered), ordered[0] * ordered[1]])


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(count) - (count - 1) / 2)[place], np.float64)


def _correlations(outputs: int, sums: Sums) -> Metrics:
    """Pearson's correlation of numbers and of their ranks, which is Spearman's; the mean of all outputs."""
    own, count = sums[..., NUM_BASIC + 1 :], sums[..., LABELS, None]
    numbers, ranks = own[..., : _MOMENTS * outputs], own[..., _MOMENTS * outputs :]
    return {name: _pearson(part, count) for name, part in (("pearson", numbers), ("spearman", ranks))}


def _pearson(moments: NDArray[np.float64], count: NDArray[np.float64]) -> NDArray[np.float64]:
    x, y, xx, yy, xy = np.split(moments, _MOMENTS, axis=-1)
    spread = np.maximum(count * xx - x**2, 0.0) * np.maximum(count * yy - y**2, 0.0)
    return np.asarray(((count * xy - x * y) / np.sqrt(spread)).mean(axis=-1), np.float64)


CLASS_COUNTS: dict[str, Callable[[RunConfig], Counts]] = {
    "single": _count_single,
    "multi": _count_multi,
    "regression": _count_numbers,
}
