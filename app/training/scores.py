"""Metrics of rows: sums over counts, the same for any batch size, packing, order or number of processes."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.batch import Batch
from app.config.kinds import LOGGED, METRICS
from app.distributed.process_group import HostGroup, Runtime
from app.model.losses import log_probabilities
from app.model.training_model import TrainingModel, evaluating
from app.oom_retry import RetryOnRestart, in_parts_that_fit, require_halves, split_batch, try_or_none
from app.tasks.interface import NUM_BASIC, Counts, Sums

ALSO = "also_"  # prefix of metrics of `eval.also`
_NORMAL_95 = 1.96  # standard errors


def logged(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return values for a line of metrics.jsonl, without shares and means of no rows."""
    values = {key: metrics[key] for key in (*LOGGED, *(f"{ALSO}{key}" for key in LOGGED)) if key in metrics}
    return {key: value for key, value in values.items() if key.endswith("eval_loss") or not math.isnan(value)}


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return only finite metrics, for files."""
    return {key: value for key, value in metrics.items() if math.isfinite(value)}


def score(
    model: TrainingModel, batches: Iterable[Batch], runtime: Runtime, counts: Counts, depth: int = 0
) -> dict[str, float]:
    """Return the metrics of the batches of all processes.

    `depth`: how often batches are halved if all processes must make the same number of passes.
    """
    _, row_sums = _of_rows(model, batches, runtime, counts, depth)
    if counts.of_all is not None:
        row_sums = _shared(row_sums, runtime.host_group, counts.of_all)
    used = [(a, b) for top, below in counts.ratios.values() for a, b in ((top, top), (top, below), (below, below))]
    mine = [*row_sums.sum(axis=0), *(row_sums[:, a] @ row_sums[:, b] for a, b in used), len(row_sums)]
    totals = np.array(runtime.host_group.totals([float(value) for value in mine]))
    sums, products, rows = np.split(totals, [row_sums.shape[1], -1])
    metrics = {key: float(value) for key, value in counts.metrics(sums).items()}
    return metrics | _margins(metrics, counts, sums, products.reshape(-1, 3), float(rows[0]))


def _shared(mine: Sums, host_group: HostGroup, of_all: Callable[[Sums], Sums]) -> Sums:
    """Return the rows of this process with columns that need the rows of all processes."""
    by_rank = host_group.all_gather_object(mine)
    together, first = of_all(np.concatenate(by_rank)), sum(map(len, by_rank[: host_group.rank]))
    return together[first : first + len(mine)]


def _margins(
    metrics: Mapping[str, float], counts: Counts, sums: Sums, products: Sums, documents: float
) -> dict[str, float]:
    """Return half of the 95% interval of each ratio, by the spread of documents; `products`: sums of column products.

    If all are right or all wrong, the rule of three: margin 3 / n.
    """
    margins = {}
    for (key, (_, below)), (squares, mixed, squares_below) in zip(counts.ratios.items(), products, strict=True):
        value = metrics[key]
        if documents > 1 and math.isfinite(value):
            spread = squares - 2 * value * mixed + value**2 * squares_below
            margin = _NORMAL_95 * math.sqrt(max(spread, 0.0) * documents / (documents - 1)) / sums[below]
            alike = METRICS[key].is_share and value in {0.0, 1.0}
            margins[f"{key}_margin"] = min(1.0, 3 / documents) if alike else float(margin)
    return margins


def score_documents(
    model: TrainingModel, batches: Iterable[Batch], runtime: Runtime, rows: int, documents_per_row: int
) -> Sums:
    """Return the log-probabilities of the documents of `rows` rows, in order, on every process."""
    samples, values = list[int](), [torch.zeros(0, documents_per_row, dtype=torch.float64, device=runtime.device)]
    with evaluating(model):
        for part, (losses, _) in _scored(model, batches, runtime, depth=0):
            samples += part.samples
            values.append(log_probabilities(losses, part.to(runtime.device)).view(-1, documents_per_row))
    total, mine = np.zeros((rows, documents_per_row)), (samples, torch.cat(values).cpu().numpy())
    for numbers, sums in runtime.host_group.all_gather_object(mine):
        total[numbers] = sums
    return total


def score_rows(model: TrainingModel, batches: Iterable[Batch], runtime: Runtime, rows: int, counts: Counts) -> Sums:
    """Return the sums of each of `rows` rows, in order, gathered on every process."""
    total = np.zeros((rows, NUM_BASIC + counts.num_task_columns))
    mine = _of_rows(model, batches, runtime, counts, depth=0)
    for samples, sums in runtime.host_group.all_gather_object(mine):
        total[samples] = sums
    return total if counts.of_all is None else counts.of_all(total)


def with_step_mean(model: TrainingModel, batches: Iterable[Batch], runtime: Runtime, depth: int) -> Iterable[Batch]:
    """Set the mean required by the loss in all batches of a step or an evaluation, by an extra pass.

    The mean is over all processes, without dropout: it does not depend on the split of rows.
    """
    of_step = model.loss.of_step
    if of_step is None:
        return batches
    batches = [*batches]
    scored = [part for batch in batches for part in batch.mean_of or (batch,)]
    parts = scored if model.sharding is not None else [part for batch in scored for part in split_batch(batch, depth)]
    total = torch.zeros(2, dtype=torch.float64, device=runtime.device)  # sum and number of terms
    with evaluating(model):
        for part, (losses, _) in _scored(model, parts, runtime, depth):
            if part.num_labels:
                on_device = part.to(runtime.device)
                terms = of_step(log_probabilities(losses, on_device), on_device)
                total[0] += terms.sum()
                total[1] += len(terms)
    runtime.sum_in_place(total)
    return [replace(batch, mean_of=(), step_mean=total[0] / total[1].clamp(min=1)) for batch in batches]


_Scored = Iterator[tuple[Batch, tuple[Tensor, Tensor]]]


def _scored(model: TrainingModel, batches: Iterable[Batch], runtime: Runtime, depth: int) -> _Scored:
    """Yield each batch, or parts of it that fit, with losses and predictions."""
    context = runtime.context

    def scores(batch: Batch) -> tuple[Tensor, Tensor]:
        losses, chosen = model.scores(runtime.on_device(batch))
        if context is None:
            return losses, chosen
        return context.gathered(losses, batch), context.gathered(chosen, batch)

    if model.sharding is None and context is None:
        for batch in batches:
            yield from in_parts_that_fit(batch, scores)
        return
    for scored in _in_lockstep(scores, batches, runtime.host_group, depth):
        if context is None or context.index == 0:  # counted once
            yield scored
    if model.sharding is not None:
        model.sharding.at_rest()


def _in_lockstep(
    scores: Callable[[Batch], tuple[Tensor, Tensor]], batches: Iterable[Batch], host_group: HostGroup, depth: int
) -> _Scored:
    """Make the same number of passes on all ranks: a rank with fewer batches repeats one, without counting it."""
    parts = [part for batch in batches for part in split_batch(batch, depth)]
    mine = replace(parts[0], step_mean=None) if parts else None  # in CPU memory only
    spare = next(batch for batch in host_group.all_gather_object(mine) if batch is not None)
    for part in host_group.lockstep(parts):
        result = try_or_none(scores, part or spare)
        if result is None:
            require_halves(part or spare)  # raises if the next start could not split it either
            raise RetryOnRestart("a batch of an evaluation", depth + 1)
        if part is not None:
            yield part, result


def _of_rows(
    model: TrainingModel, batches: Iterable[Batch], runtime: Runtime, counts: Counts, depth: int
) -> tuple[NDArray[np.int64], Sums]:
    """Return the number of each data row, and its sums, which stay on the device until the last batch."""
    samples, device = list[int](), runtime.device
    task_counts = [
        torch.zeros(0, counts.num_task_columns, dtype=torch.bool, device=device)
    ]  # the dtype follows the next parts
    host_sums, sums = [np.zeros((3, 0))], [torch.zeros(3, 0, dtype=torch.float64, device=device)]
    batches = with_step_mean(model, batches, runtime, depth)
    with evaluating(model):
        for part, (losses, chosen) in _scored(model, batches, runtime, depth):
            batch, number = part.to(device), part.num_labels
            correct = batch.targets[:number] == chosen[:number]
            correct = correct if correct.ndim == 1 else correct.all(-1)  # an answer of several outputs
            samples += part.samples
            on_device, on_host = _row_sums(part, losses[:number], correct, answers=counts.answers)
            if model.loss.of_rows is not None:
                on_device[0] = model.loss.of_rows(log_probabilities(losses, batch), batch)
                on_host[2] = 1.0
            sums.append(on_device)
            host_sums.append(on_host)
            task_counts.append(counts.task_columns(batch, losses, chosen))
    loss, hits, exact = torch.cat(sums, dim=1).cpu().numpy()
    labels, answered, weight = np.concatenate(host_sums, axis=1)
    basic = np.stack([loss, labels, hits, answered, exact, weight], axis=1)
    return np.array(samples, np.int64), np.hstack([basic, torch.cat(task_counts).cpu().numpy()])


def _row_sums(batch: Batch, losses: Tensor, correct: Tensor, *, answers: bool) -> tuple[Tensor, NDArray[np.float64]]:
    """Return [3, rows] on the device: weighted loss, correct tokens, correct answers; on the CPU: their counts.

    An answer is a contiguous span of trained tokens, including its end token. Greedy generation reproduces it exactly
    if each token is the most likely after the previous ones, so one forward pass decides exact match.
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
