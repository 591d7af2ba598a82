"""Losses by task, and by problem of a classification: how what a model says of a batch becomes one sum."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from app.batch import Batch
from app.config.schema import PreferenceConfig, TaskConfig
from app.model.preference import log_ratios, loss_of_labelled, loss_of_pairs

if TYPE_CHECKING:
    from app.model.training_model import TrainingModel

OfDocuments = Callable[[Tensor, Batch], Tensor]  # a function of the log-probability of each document


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss sum of a batch from its labelled hidden states; `Batch.label_weight` is what a step divides it by."""

    of_states: Callable[["TrainingModel", Tensor, Batch], Tensor]
    of_rows: OfDocuments | None = None  # the loss of each data row, where it is one over documents
    of_step: OfDocuments | None = None  # terms whose mean over a whole step `of_rows` reads as `Batch.step_mean`


def _of_tokens(model: "TrainingModel", states: Tensor, batch: Batch) -> Tensor:
    return model.token_loss_sum(states, batch.targets, None if batch.weights is None else batch.weights.per_target)


def _of_likely_tokens(model: "TrainingModel", states: Tensor, batch: Batch) -> Tensor:
    """Dynamic fine-tuning: without the factor, an unlikely token's gradient is as large as one over its probability."""
    losses, _ = model.token_scores(states.detach(), batch.targets)
    factors = (-losses.float()).exp()
    if batch.weights is not None:
        factors = factors * batch.weights.per_target
    return model.token_loss_sum(states, batch.targets, factors)


def _of_classes(model: "TrainingModel", states: Tensor, batch: Batch) -> Tensor:
    losses, logits = model.class_losses(states, batch)
    if not batch.num_labels:
        return logits.sum() * 0.0  # which the graph depends on
    # no product of vectors, which autocast would compute in 16 bits
    return losses.sum() if batch.weights is None else (losses * batch.weights.per_target).sum()


def over_documents(of_rows: OfDocuments, of_step: OfDocuments | None = None) -> Loss:
    """A loss that is any function of the documents' log-probabilities, such as one over pairs of answers.

    With L = f(s), where s[d] is the sum of log p[t] over the trained tokens t of document d, the chain rule gives

        dL = sum over d of f'[d] ds[d] = sum over t of c[t] d(-log p[t])        with c[t] = -f'[d of t]

    So the gradient of L is that of a token loss with the weights c, which are numbers. A first pass through the head,
    without a graph, gives s; f is differentiated at s, which is a vector; a second pass is the token loss. Logits are
    kept by neither, for any f.

    `of_step` gives a vector of terms for a batch, of any length: their mean over the step of all processes reaches
    `of_rows` as `Batch.step_mean`, without a gradient.
    """
    return Loss(partial(_of_documents, of_rows), of_rows, of_step)


def _of_documents(of_rows: OfDocuments, model: "TrainingModel", states: Tensor, batch: Batch) -> Tensor:
    """A loss sum over documents, by two passes through the head."""
    losses, _ = model.token_scores(states.detach(), batch.targets)
    sums = log_probabilities(losses, batch).requires_grad_()
    assert batch.document_of_label is not None
    with torch.enable_grad():
        total = of_rows(sums, batch).sum() if batch.num_labels else sums.sum()
    (slope,) = torch.autograd.grad(total, sums)
    per_label = torch.cat([-slope, slope.new_zeros(1)])[batch.document_of_label]  # the last is of filling targets
    weighted = model.token_loss_sum(states, batch.targets, per_label.float())
    return total.detach().float() + weighted - weighted.detach()


def log_probabilities(losses: Tensor, batch: Batch) -> Tensor:
    """[D] in float64, of the trained tokens of each document: sums of thousands of float32 terms would cancel badly."""
    assert batch.document_of_label is not None, "over_documents: the task's objective must have it, as its loss has"
    sums = torch.zeros(len(batch.lengths) + 1, dtype=torch.float64, device=losses.device)
    return sums.index_add(0, batch.document_of_label, -losses.double())[:-1]


@dataclass(frozen=True, slots=True)
class ClassLoss:
    """A problem of a classification: what logits [N, C] are compared with, and what is read of them."""

    of_answers: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # [N], of logits, targets and weights of classes
    chosen: Callable[[Tensor], Tensor]  # in the form of targets
    values: Callable[[Tensor], Tensor]  # what people read of each output
    blank: Callable[..., Tensor]  # targets of so many answers and outputs, as a memory plan needs them


def _binary_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weights, reduction="none").mean(-1)


PROBLEM_LOSSES: dict[str, ClassLoss] = {
    "single": ClassLoss(  # weights are those of answers, of the batch
        lambda logits, targets, _weights: F.cross_entropy(logits, targets, reduction="none"),
        lambda logits: logits.argmax(-1),
        lambda logits: logits.softmax(-1),
        lambda answers, outputs: torch.zeros(answers, dtype=torch.int64),  # noqa: ARG005,
    ),
    "multi": ClassLoss(
        _binary_cross_entropy,
        lambda logits: (logits >= 0).float(),
        torch.sigmoid,
        lambda answers, outputs: torch.zeros((answers, outputs)),
    ),
    "regression": ClassLoss(
        lambda logits, targets, _weights: (logits - targets).square().mean(-1),
        lambda logits: logits,
        lambda logits: logits,
        lambda answers, outputs: torch.zeros((answers, outputs)),
    ),
}

_TOKENS, _CLASSES = Loss(_of_tokens), Loss(_of_classes)
_BY_NAME = {"nll": _TOKENS, "dft": Loss(_of_likely_tokens)}
LOSSES: dict[str, Callable[[TaskConfig, PreferenceConfig], Loss]] = {
    "causal": lambda task, _preference: _BY_NAME[task.loss],
    "masked": lambda _task, _preference: _TOKENS,
    "classification": lambda _task, _preference: _CLASSES,
    "tokens": lambda _task, _preference: _CLASSES,
    "preference": lambda _task, preference: over_documents(partial(loss_of_pairs, preference)),
    "preference_label": lambda _task, preference: over_documents(partial(loss_of_labelled, preference), log_ratios),
}
