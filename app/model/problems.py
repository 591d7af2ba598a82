"""Problems of a classification: losses of its answers, and what is read of its logits."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ClassLoss:
    """What logits [N, C] are compared with."""

    of_answers: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # [N], of logits, targets and weights of classes
    chosen: Callable[[Tensor], Tensor]  # in the form of targets
    values: Callable[[Tensor], Tensor]  # what people read of each output
    blank: Callable[..., Tensor]  # targets of so many answers and outputs, as a memory plan needs them


def _cross_entropy(logits: Tensor, targets: Tensor, _weights: Tensor | None) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="none")  # weights are those of answers, of the batch


def _binary_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weights, reduction="none").mean(-1)


def _squared_error(logits: Tensor, targets: Tensor, _weights: Tensor | None) -> Tensor:
    return (logits - targets).square().mean(-1)


def _numbers(answers: int, *, outputs: int) -> Tensor:
    return torch.zeros(answers, outputs)


def _class_ids(answers: int, *, outputs: int) -> Tensor:  # noqa: ARG001
    return torch.zeros(answers, dtype=torch.int64)


PROBLEM_LOSSES: dict[str, ClassLoss] = {
    "single": ClassLoss(
        _cross_entropy, lambda logits: logits.argmax(-1), lambda logits: logits.softmax(-1), _class_ids
    ),
    "multi": ClassLoss(_binary_cross_entropy, lambda logits: (logits >= 0).float(), torch.sigmoid, _numbers),
    "regression": ClassLoss(_squared_error, lambda logits: logits, lambda logits: logits, _numbers),
}
