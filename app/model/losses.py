"""Loss of a batch as a sum over its labeled hidden states; any function of documents becomes token weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from app.batch import Batch

OfDocuments = Callable[[Tensor, Batch], Tensor]  # a function of the log-probability of each document


class LossHead(Protocol):
    """Model head that a loss applies to labeled hidden states."""

    def token_loss_sum(self, rows: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """Return the sum of cross-entropies over all targets, each times its weight."""

    def token_scores(self, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of each target and the most likely token."""

    def class_logits(self, rows: Tensor) -> Tensor:
        """Return fp32 logits of a classification head."""


def _token_scores(head: LossHead, states: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return head.token_scores(states, batch.targets)


def _token_ids(answers: int, outputs: int) -> Tensor:  # noqa: ARG001
    return torch.zeros(answers, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss sum of a batch from its labeled hidden states; a step divides it by `Batch.label_weight`."""

    of_states: Callable[[LossHead, Tensor, Batch], Tensor]
    scores: Callable[[LossHead, Tensor, Batch], tuple[Tensor, Tensor]] = _token_scores  # loss and choice by target
    of_rows: OfDocuments | None = None  # loss of each data row, for losses over documents
    of_step: OfDocuments | None = None  # terms whose mean over a step `of_rows` reads as `Batch.step_mean`
    blank_targets: Callable[..., Tensor] = _token_ids  # by number of answers and outputs, for a memory plan


def _of_tokens(head: LossHead, states: Tensor, batch: Batch) -> Tensor:
    return head.token_loss_sum(states, batch.targets, None if batch.weights is None else batch.weights.per_target)


TOKEN_LOSS = Loss(_of_tokens)


def over_documents(of_rows: OfDocuments, of_step: OfDocuments | None = None) -> Loss:
    """Return a loss that is any function of the documents' log-probabilities, such as a loss over pairs of answers.

    With L = f(s), where s[d] is the sum of log p[t] over the trained tokens t of document d, the chain rule gives

        dL = sum over d of f'[d] ds[d] = sum over t of c[t] d(-log p[t])        with c[t] = -f'[d of t]

    So the gradient of L equals that of a token loss with constant weights c. A first pass through the head, without a
    graph, gives s; f is differentiated at the vector s; a second pass is the token loss. Neither pass keeps logits,
    for any f.

    `of_step` returns a vector of terms for a batch, of any length: their mean over the step of all processes is passed
    to `of_rows` as `Batch.step_mean`, without a gradient.
    """
    return Loss(partial(_of_documents, of_rows), of_rows=of_rows, of_step=of_step)


def _of_documents(of_rows: OfDocuments, head: LossHead, states: Tensor, batch: Batch) -> Tensor:
    """Return a loss sum over documents, by two passes through the head."""
    losses, _ = head.token_scores(states.detach(), batch.targets)
    sums = log_probabilities(losses, batch).requires_grad_()
    assert batch.document_of_label is not None
    with torch.enable_grad():
        total = of_rows(sums, batch).sum() if batch.num_labels else sums.sum()
    (slope,) = torch.autograd.grad(total, sums)
    per_label = torch.cat([-slope, slope.new_zeros(1)])[batch.document_of_label]  # the last is for padding targets
    weighted = head.token_loss_sum(states, batch.targets, per_label.float())
    return total.detach().float() + weighted - weighted.detach()


def log_probabilities(losses: Tensor, batch: Batch) -> Tensor:
    """Return the log-probability [D] of each document's trained tokens, in float64: float32 sums of thousands of terms
    would lose precision.
    """
    assert batch.document_of_label is not None, "over_documents: the task's objective must have it, as its loss has"
    sums = torch.zeros(len(batch.lengths) + 1, dtype=torch.float64, device=losses.device)
    return sums.index_add(0, batch.document_of_label, -losses.double())[:-1]
