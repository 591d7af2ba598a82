"""Classification of texts and pairs: one class, several classes, or numbers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from app.batch import Batch
from app.config.kinds import PROBLEMS, text_of
from app.config.schema import PreferenceConfig, RunConfig, TaskConfig
from app.config.tasks import labeling_of
from app.data.labels import LABELINGS, parts_of
from app.data.objectives import LabeledTokens, Objective
from app.data.token_dataset import TokenRows
from app.data.tokenizer import Tokenizer
from app.model.losses import Loss, LossHead
from app.model.training_model import TrainingModel
from app.tasks.interface import (
    HITS,
    LABELS,
    LOSS,
    NUM_BASIC,
    WEIGHT,
    Counts,
    HeldOutRows,
    Implementation,
    Metrics,
    Sums,
)
from app.tracking.formatting import Sample


@dataclass(frozen=True, slots=True)
class Classification(Objective):
    """Prediction of class or numbers from one hidden state, the same as in transformers.

    The first state if the model is bidirectional, else the last without padding.
    """

    names: tuple[str, ...]
    bidirectional: bool = field()  # without the default of Objective
    pad_id: int | None
    labeling: str = "single"
    weights: tuple[float, ...] = ()  # of answers by class; (): all 1

    def label(self, rows: TokenRows, i: int, epoch: int) -> tuple[LabeledTokens, ...]:  # noqa: ARG002  nothing is drawn
        targets = LABELINGS[self.labeling].targets(rows.class_of(i), self.names)
        weights = np.array(self.weights, np.float32)[targets] if self.weights else None
        return (LabeledTokens(rows.ids(i), self.at(rows, i), targets, weights, second_start=rows.second_start(i)),)

    def at(self, rows: TokenRows, i: int) -> NDArray[np.int64]:
        """Return the predicting states; the first if all tokens are padding."""
        ids = rows.ids(i)
        real = np.flatnonzero(ids != self.pad_id) if self.pad_id is not None else np.arange(len(ids))
        return np.array([0 if self.bidirectional or not len(real) else real[-1]])

    def shown(self, rows: TokenRows, i: int) -> tuple[NDArray[np.float32], str]:
        return np.zeros(len(rows.ids(i)), np.float32), ", ".join(parts_of(rows.class_of(i))) or "none"


def objective_of_labels(
    kind: type[Classification], config: TaskConfig, tokenizer: Tokenizer, _seed: int, bidirectional: bool
) -> Objective:
    """Return the objective for labels of documents or words."""
    labeling, class_weights = labeling_of(config), config.class_weights
    weights = tuple(class_weights) if isinstance(class_weights, list) and LABELINGS[labeling].weighs_answers else ()
    return kind(tuple(config.labels), bidirectional, tokenizer.pad_token_id, labeling, weights)


# ---- loss


@dataclass(frozen=True, slots=True)
class ClassProblem:
    """A value of `task.problem`: its loss, predictions and metrics."""

    of_answers: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # [N], from logits [N, C], targets and class weights
    predictions: Callable[[Tensor], Tensor]  # in the form of targets
    values: Callable[[Tensor], Tensor]  # shown value of each output
    blank: Callable[..., Tensor]  # empty targets by answers and outputs, for the memory estimate
    counts: Callable[[RunConfig], Counts]


@dataclass(slots=True)
class _ClassLoss:
    """Loss of each answer from the logits of the head, with class weights."""

    problem: ClassProblem
    weights: list[float] | None
    _on_device: Tensor | None = None

    def losses(self, head: LossHead, states: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of each answer, and logits, which a batch without answers has for its fillers."""
        logits = head.class_logits(states)
        if not batch.num_labels:
            return logits.new_zeros(0), logits
        if self.weights is not None and (self._on_device is None or self._on_device.device != logits.device):
            self._on_device = torch.tensor(self.weights, device=logits.device)  # once, because the copy synchronizes
        return self.problem.of_answers(logits, batch.targets, self._on_device), logits

    def sum(self, head: LossHead, states: Tensor, batch: Batch) -> Tensor:
        losses, logits = self.losses(head, states, batch)
        if not batch.num_labels:
            return logits.sum() * 0.0  # keeps the graph
        # not a dot product, which autocast would compute in 16 bits
        return losses.sum() if batch.weights is None else (losses * batch.weights.per_target).sum()

    def scores(self, head: LossHead, states: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        losses, logits = self.losses(head, states, batch)
        return losses, self.problem.predictions(logits)


def class_loss(task: TaskConfig, _preference: PreferenceConfig) -> Loss:
    """Return the loss of `task.problem`."""
    weights = task.class_weights if isinstance(task.class_weights, list) else None
    loss = _ClassLoss(CLASS_PROBLEMS[task.problem], weights)
    return Loss(loss.sum, loss.scores, blank_targets=loss.problem.blank)


def _binary_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weights, reduction="none").mean(-1)


# ---- metrics


def _count_single(run: RunConfig) -> Counts:
    ratios, classes = {"eval_loss": (LOSS, WEIGHT), "accuracy": (HITS, LABELS)}, len(run.task.labels)
    return Counts(ratios, macro_f1, task_columns=partial(occurrences, classes), num_task_columns=3 * classes)


def occurrences(classes: int, batch: Batch, _losses: Tensor, predictions: Tensor) -> Tensor:
    """Return whether each class is true, predicted or both, by label."""
    names = torch.arange(classes, device=predictions.device)
    true, predicted = (labels[: batch.num_labels, None] == names for labels in (batch.targets, predictions))
    return torch.cat([true, predicted, true & predicted], dim=1)


def macro_f1(sums: Sums) -> Metrics:
    """Return the mean F1 of all classes that are true or predicted at least once."""
    true, predicted, both = np.split(sums[..., NUM_BASIC:], 3, axis=-1)
    occurrences = true + predicted
    f1 = np.divide(2 * both, occurrences, out=np.zeros_like(both), where=occurrences > 0)
    return {"macro_f1": f1.sum(axis=-1) / (occurrences > 0).sum(axis=-1)}


def _count_multi(run: RunConfig) -> Counts:
    ratios, classes = {"eval_loss": (LOSS, WEIGHT), "accuracy": (HITS, LABELS)}, len(run.task.labels)
    return Counts(ratios, _both_f1, task_columns=_labels, num_task_columns=3 * classes)


def _labels(batch: Batch, _losses: Tensor, predictions: Tensor) -> Tensor:
    """Return whether each label is true, predicted or both, by document."""
    true, predicted = (labels[: batch.num_labels].bool() for labels in (batch.targets, predictions))
    return torch.cat([true, predicted, true & predicted], dim=1)


def _both_f1(sums: Sums) -> Metrics:
    true, predicted, both = (part.sum(axis=-1) for part in np.split(sums[..., NUM_BASIC:], 3, axis=-1))
    return {**macro_f1(sums), "micro_f1": 2 * both / (true + predicted)}


_MOMENTS = 5  # sums of two numbers, their squares and their product


def _count_numbers(run: RunConfig) -> Counts:
    outputs, error = len(run.task.labels), NUM_BASIC
    return Counts(
        {"eval_loss": (LOSS, WEIGHT), "mae": (error, LABELS)},
        partial(_correlations, outputs),
        task_columns=_compared,
        num_task_columns=1 + _MOMENTS * outputs,
        of_all=partial(_with_ranks, outputs),
    )


def _compared(batch: Batch, _losses: Tensor, predictions: Tensor) -> Tensor:
    """Return the mean absolute error of each document, and the moments of true and predicted numbers."""
    true, predicted = (numbers[: batch.num_labels].double() for numbers in (batch.targets, predictions))
    error = (true - predicted).abs().mean(dim=1, keepdim=True)
    return torch.cat([error, true, predicted, true.square(), predicted.square(), true * predicted], dim=1)


def _with_ranks(outputs: int, rows: Sums) -> Sums:
    """Append the moments of ranks; equal numbers have their mean rank."""
    true, predicted = (rows[:, NUM_BASIC + 1 + side * outputs :][:, :outputs] for side in (0, 1))
    ranks = [np.stack([_ranks(column) for column in side.T], axis=1) for side in (true, predicted)]
    centered = [values - (len(rows) + 1) / 2 for values in ranks]
    return np.hstack([rows, *centered, *(values**2 for values in centered), centered[0] * centered[1]])


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(count) - (count - 1) / 2)[place], np.float64)


def _correlations(outputs: int, sums: Sums) -> Metrics:
    """Return the Pearson and Spearman (Pearson of ranks) correlations, averaged over outputs."""
    moments, count = sums[..., NUM_BASIC + 1 :], sums[..., LABELS, None]
    numbers, ranks = moments[..., : _MOMENTS * outputs], moments[..., _MOMENTS * outputs :]
    return {name: _pearson(part, count) for name, part in (("pearson", numbers), ("spearman", ranks))}


def _pearson(moments: NDArray[np.float64], count: NDArray[np.float64]) -> NDArray[np.float64]:
    x, y, xx, yy, xy = np.split(moments, _MOMENTS, axis=-1)
    spread = np.maximum(count * xx - x**2, 0.0) * np.maximum(count * yy - y**2, 0.0)
    return np.asarray(((count * xy - x * y) / np.sqrt(spread)).mean(axis=-1), np.float64)


# ---- answers


def _answer(held_out: HeldOutRows, model: TrainingModel) -> list[Sample]:
    """Predict the class with its probability, the classes, or the numbers of each row."""
    assert isinstance(held_out.objective, Classification)
    problem, values = PROBLEMS[held_out.objective.labeling], CLASS_PROBLEMS[held_out.objective.labeling].values
    samples = []
    for i in held_out.indices:
        (row,) = held_out.objective.label(held_out.rows, i, epoch=0)
        ids = torch.from_numpy(row.ids.astype(np.int64))
        segments = None if row.second_start < 0 else (torch.arange(len(ids)) >= row.second_start).long()
        outputs = dict(zip(held_out.objective.names, values(model.logits(ids, segments).float()).tolist(), strict=True))
        answer = problem.answer(outputs)
        samples.append(
            Sample(
                prompt=held_out.text(row.ids),
                expected=held_out.objective.shown(held_out.rows, i)[1],
                answer=text_of(answer),
                likelihood=outputs.get(answer) if isinstance(answer, str) else None,
            )
        )
    return samples


CLASS_PROBLEMS: dict[str, ClassProblem] = {
    "single": ClassProblem(  # class weights are answer weights of the batch
        lambda logits, targets, _weights: F.cross_entropy(logits, targets, reduction="none"),
        lambda logits: logits.argmax(-1),
        lambda logits: logits.softmax(-1),
        lambda answers, outputs: torch.zeros(answers, dtype=torch.int64),  # noqa: ARG005,
        _count_single,
    ),
    "multi": ClassProblem(
        _binary_cross_entropy,
        lambda logits: (logits >= 0).float(),
        torch.sigmoid,
        lambda answers, outputs: torch.zeros((answers, outputs)),
        _count_multi,
    ),
    "regression": ClassProblem(
        lambda logits, targets, _weights: (logits - targets).square().mean(-1),
        lambda logits: logits,
        lambda logits: logits,
        lambda answers, outputs: torch.zeros((answers, outputs)),
        _count_numbers,
    ),
}

CLASSIFICATION = Implementation(
    objective=partial(objective_of_labels, Classification),
    loss=class_loss,
    counts=lambda run: CLASS_PROBLEMS[run.task.problem].counts(run),
    answers=_answer,
    most_labels=lambda _config, _tokens, documents: documents,
)
