"""Metrics of rows: sums over counts, the same for any batch size, packing, order or number of processes."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.batch import Batch
from app.config.metrics import LOGGED, METRICS
from app.distributed.process_group import HostGroup, Runtime
from app.model.losses import log_probabilities
from app.model.training_model import TrainingModel
from app.oom_retry import RetryOnRestart, in_parts_that_fit, require_halves, split_batch, try_or_none

# [..., 6] for each row or a sum of rows. For a classification three counts of each class follow: how often it is true,
# how often it was predicted, how often both.
Sums = NDArray[np.float64]
LOSS, LABELS, HITS, ANSWERS, EXACT, WEIGHT = range(6)  # all but losses and weights are counts
_NUM_BASIC = 6
_RATIOS = {
    "eval_loss": (LOSS, WEIGHT),
    "token_accuracy": (HITS, LABELS),
    "accuracy": (HITS, LABELS),
    "exact_match": (EXACT, ANSWERS),
}
_NORMAL_95 = 1.96  # standard errors


def metrics_of(sums: Sums) -> dict[str, NDArray[np.float64]]:
    """Metrics from sums. NaN where there is nothing to divide by: rows without answers have no exact match."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        loss = sums[..., LOSS] / sums[..., WEIGHT]
        correct = sums[..., HITS] / sums[..., LABELS]
        if sums.shape[-1] > _NUM_BASIC:
            return {"eval_loss": loss, "accuracy": correct, "macro_f1": _macro_f1(sums[..., _NUM_BASIC:])}
        return {
            "eval_loss": loss,
            "perplexity": np.exp(loss),
            "token_accuracy": correct,  # share of tokens that are the likeliest after all before them
            "exact_match": sums[..., EXACT] / sums[..., ANSWERS],
        }


def _macro_f1(counts: Sums) -> NDArray[np.float64]:
    """The mean F1 of all classes that are true or were predicted at least once."""
    true, chosen, both = np.split(counts, 3, axis=-1)
    there = true + chosen
    f1 = np.divide(2 * both, there, out=np.zeros_like(both), where=there > 0)
    mean: NDArray[np.float64] = f1.sum(axis=-1) / (there > 0).sum(axis=-1)
    return mean


def logged(metrics: Mapping[str, float]) -> dict[str, float]:
    """Values for a line of metrics, without an exact match of rows that have no answers."""
    values = {key: metrics[key] for key in LOGGED if key in metrics}
    return {key: value for key, value in values.items() if key != "exact_match" or not math.isnan(value)}


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics without those that are no number, for files."""
    return {key: value for key, value in metrics.items() if math.isfinite(value)}


def score(
    model: TrainingModel,
    batches: Iterable[Batch],
    runtime: Runtime,
    *,
    answers: bool = False,
    classes: int = 0,
    depth: int = 0,
) -> dict[str, float]:
    """Metrics of the batches of all processes. `answers`: whether exact match of whole answers is counted.

    `depth`: how often batches are halved where all processes must make the same number of passes.
    """
    scored = _scored(model, batches, runtime, depth)
    _, found = _of_rows(model, scored, runtime.device, answers=answers, classes=classes)
    basic = found[:, :_NUM_BASIC]
    mine = [*found.sum(axis=0), *(basic.T @ basic).ravel(), len(found)]
    totals = np.array(runtime.host_group.totals([float(each) for each in mine]))
    size = found.shape[1]
    metrics = {key: float(value) for key, value in metrics_of(totals[:size]).items()}
    return metrics | _margins(metrics, totals[:size], totals[size:-1].reshape(_NUM_BASIC, -1), totals[-1])


def _margins(metrics: Mapping[str, float], sums: Sums, squares: Sums, documents: float) -> dict[str, float]:
    """Half of each metric's 95 % interval, by the spread of documents; `squares`: their sums multiplied by each other.

    The error of a ratio of sums. Documents that are all right or all wrong have no spread: three in as many as there
    are may differ.
    """
    found = {}
    for key, (top, below) in _RATIOS.items():
        value = metrics.get(key, math.nan)
        if documents > 1 and math.isfinite(value):
            spread = squares[top, top] - 2 * value * squares[top, below] + value**2 * squares[below, below]
            margin = _NORMAL_95 * math.sqrt(max(spread, 0.0) * documents / (documents - 1)) / sums[below]
            alike = METRICS[key].is_share and value in {0.0, 1.0}
            found[f"{key}_margin"] = min(1.0, 3 / documents) if alike else float(margin)
    return found


def score_rows(
    model: TrainingModel, batches: Iterable[Batch], runtime: Runtime, rows: int, *, answers: bool, classes: int = 0
) -> Sums:
    """The sums of each of `rows` rows, in their order, gathered on every process."""
    total = np.zeros((rows, _NUM_BASIC + 3 * classes))
    scored = _scored(model, batches, runtime, depth=0)
    mine = _of_rows(model, scored, runtime.device, answers=answers, classes=classes)
    for samples, found in runtime.host_group.collected(mine):
        total[samples] = found
    return total


_Scored = Iterator[tuple[Batch, tuple[Tensor, Tensor]]]


def _scored(model: TrainingModel, batches: Iterable[Batch], runtime: Runtime, depth: int) -> _Scored:
    """Yield each batch, or parts of it that fit, with losses and predictions."""

    def scores(batch: Batch) -> tuple[Tensor, Tensor]:
        return model.scores(batch.to(runtime.device))

    if model.sharding is None:
        for batch in batches:
            yield from in_parts_that_fit(batch, scores)
        return
    yield from _in_step(scores, batches, runtime.host_group, depth)
    model.sharding.at_rest()


def _in_step(
    scores: Callable[[Batch], tuple[Tensor, Tensor]], batches: Iterable[Batch], host_group: HostGroup, depth: int
) -> _Scored:
    """Make the same number of passes on all ranks: one with fewer batches repeats one, without counting it."""
    parts = [part for batch in batches for part in split_batch(batch, depth)]
    spare = next(each for each in host_group.collected(parts[0] if parts else None) if each is not None)
    for part in host_group.in_step(parts):
        found = try_or_none(scores, part or spare)
        if found is None:
            require_halves(part or spare)  # raises where the next start could not split it either
            raise RetryOnRestart("a batch of an evaluation", depth + 1)
        if part is not None:
            yield part, found


def _of_rows(
    model: TrainingModel, scored: _Scored, device: torch.device, *, answers: bool, classes: int
) -> tuple[NDArray[np.int64], Sums]:
    """The number of each data row, and its sums, which stay on the device until the last batch."""
    samples: list[int] = []
    pairs = [torch.zeros(2, 0, dtype=torch.long, device=device)]  # the true class and the predicted one
    counts, sums = [np.zeros((3, 0))], [torch.zeros(3, 0, dtype=torch.float64, device=device)]
    mode = model.training
    model.eval()
    try:
        for part, (losses, chosen) in scored:
            number = part.num_labels
            pair = torch.stack([part.targets[:number].to(device), chosen[:number]])
            samples += part.samples
            on_device, on_host = _row_sums(part, losses[:number], pair[0] == pair[1], answers=answers)
            if model.loss.of_rows is not None:
                on_device[0] = model.loss.of_rows(log_probabilities(losses, part.to(device)), part.to(device))
                on_host[2] = 1.0
            sums.append(on_device)
            counts.append(on_host)
            if classes:
                pairs.append(pair)
    finally:
        model.train(mode)
    loss, hits, exact = torch.cat(sums, dim=1).cpu().numpy()
    labels, answered, weight = np.concatenate(counts, axis=1)
    plain = np.stack([loss, labels, hits, answered, exact, weight], axis=1)
    return np.array(samples, np.int64), np.hstack([plain, *_by_class(torch.cat(pairs, dim=1), classes)])


def _by_class(pairs: Tensor, classes: int) -> list[NDArray[np.float64]]:
    """Whether each class is true, predicted or both, by document."""
    if not classes:
        return []
    true, chosen = (np.eye(classes)[each] for each in pairs.cpu().numpy())
    return [true, chosen, true * chosen]


def _row_sums(batch: Batch, losses: Tensor, correct: Tensor, *, answers: bool) -> tuple[Tensor, NDArray[np.float64]]:
    """[3, rows] on the device: weighted loss, correct tokens, correct answers; on the host: what they are of.

    An answer is an uninterrupted stretch of trained tokens, its end token included. Greedy generation writes it exactly
    if each of its tokens is the likeliest after those before it, so one forward pass decides exact match.
    """
    device, size = losses.device, len(batch.documents_of_rows)
    flat = batch.label_rows[: batch.num_labels].numpy()
    row_of_document = np.repeat(np.arange(size), batch.documents_of_rows)
    row_of_label = row_of_document[np.searchsorted(batch.starts, flat, side="right") - 1]
    # the last token of a document has no label, so labels of two documents are never adjacent
    begins = np.diff(flat, prepend=-2) != 1 if answers else np.zeros(len(flat), np.bool_)
    row_of_answer = row_of_label[begins]
    weights = None if batch.weights is None else batch.weights.per_target[: batch.num_labels].double()

    def on_device(index: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(index).to(device, non_blocking=True)

    sums = torch.zeros(3, size, dtype=torch.float64, device=device)
    row = on_device(row_of_label)
    losses = losses.double()
    sums[0].index_add_(0, row, losses if weights is None else losses * weights.to(device, non_blocking=True))
    sums[1].index_add_(0, row, correct.double())
    if len(row_of_answer):
        wrong = torch.zeros(len(row_of_answer), dtype=torch.int64, device=device)
        wrong.index_add_(0, on_device(np.cumsum(begins) - 1), (~correct).long())
        sums[2].index_add_(0, on_device(row_of_answer), (wrong == 0).double())
    weight = np.bincount(row_of_label, None if weights is None else weights.numpy(), size)
    counts = [np.bincount(row_of_label, minlength=size), np.bincount(row_of_answer, minlength=size), weight]
    return sums, np.stack(counts).astype(np.float64)
