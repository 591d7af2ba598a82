"""What is summed of each row of a task, and the metrics that come of it: losses, right answers, F1 of classes and of
tags, errors and correlations of numbers.

F1 of entities follows seqeval and CoNLL. An entity is an uninterrupted run of words of one type. It begins at B or S,
after E or S, or where the type changes, so a run may begin with I. One is right if its type and both of its ends are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.batch import Batch
from app.config.metrics import METRICS
from app.config.schema import RunConfig

Sums = NDArray[np.float64]  # [..., 6 and a task's own] for each row or a sum of rows
Metrics = Mapping[str, NDArray[np.float64]]
LOSS, LABELS, HITS, ANSWERS, EXACT, WEIGHT = range(6)  # all but losses and weights are counts
NUM_BASIC = 6


def _no_columns(batch: Batch, losses: Tensor, _chosen: Tensor) -> Tensor:
    return losses.new_zeros(len(batch.documents_of_rows), 0)


@dataclass(frozen=True, slots=True)
class Counts:
    """What is summed of each row of a task, and the metrics that come of the sums."""

    ratios: Mapping[str, tuple[int, int]]  # metrics that are one column over another, with their margins
    others: Callable[[Sums], Metrics] = lambda _: {}
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


# ---- tags of words

_OUTSIDE = "O"
_LETTERS, _STARTS, _ENDS = "BIES", "BS", "ES"  # first ones of tags in entities, of those that begin and end one
_ENTITIES = 3  # true, predicted, both


def count_tags(run: RunConfig) -> Counts:
    """Counts of tags; the F1 of entities only where tags are names of entities (B-, I-)."""
    names = run.task.labels
    ratios, classes = {"eval_loss": (LOSS, WEIGHT), "accuracy": (HITS, LABELS)}, len(names)
    entities = are_entities(names)
    own = partial(_of_rows, classes, names if entities else [])
    return Counts(ratios, _f1 if entities else macro_f1, own=own, num_own=3 * classes + _ENTITIES * entities)


def are_entities(names: Sequence[str]) -> bool:
    """Whether the tags are O and names like B-PER."""
    return any(name != _OUTSIDE for name in names) and all(
        name == _OUTSIDE or (name[:1] in _LETTERS and name[1:2] in ("", "-")) for name in names
    )


def _f1(sums: Sums) -> Metrics:
    true, found, both = np.split(sums[..., -_ENTITIES:], _ENTITIES, axis=-1)
    return {**macro_f1(sums[..., :-_ENTITIES]), "entity_f1": (2 * both / (true + found))[..., 0]}


def _of_rows(classes: int, entities: Sequence[str], batch: Batch, losses: Tensor, chosen: Tensor) -> Tensor:
    """How often each tag is true, predicted or both in each row, and so of entities."""
    starts = torch.tensor(batch.starts, device=batch.label_rows.device)
    row = torch.searchsorted(starts, batch.label_rows[: batch.num_labels], right=True) - 1  # a document is a row
    found = [occurrences(classes, batch, losses, chosen)]
    if entities:
        true, predicted = (_entities(entities, each[: batch.num_labels], row) for each in (batch.targets, chosen))
        same = (true >= 0) & (true == predicted)
        found.append(torch.stack([true >= 0, predicted >= 0, same], dim=1))
    of_labels = torch.cat(found, dim=1).float()
    return of_labels.new_zeros(len(batch.lengths), of_labels.shape[1]).index_add_(0, row, of_labels)


def _entities(names: Sequence[str], tags: Tensor, row: Tensor) -> Tensor:
    """At the first word of each entity a number of its type and end, -1 at the others."""
    kinds = list(dict.fromkeys(name[2:] for name in names))  # PER of B-PER
    facts = [(name[0] in _STARTS, name[0] in _ENDS, name != _OUTSIDE, kinds.index(name[2:])) for name in names]
    starts, ends, inside, kind = torch.tensor(facts, device=tags.device)[tags].unbind(1)
    at = torch.arange(len(tags), device=tags.device)
    apart = (row.roll(1) != row) | (at == 0) | (inside.roll(1) == 0) | (kind.roll(1) != kind) | (ends.roll(1) == 1)
    begins = (inside == 1) & ((starts == 1) | apart)
    goes_on = (inside == 1) & ~begins
    is_last = ~goes_on.roll(-1) | (at == len(tags) - 1)
    last = torch.where(is_last, at, len(tags)).flip(0).cummin(0).values.flip(0)
    return torch.where(begins, last * len(kinds) + kind, -1)
