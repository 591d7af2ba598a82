"""How the gradients of a step come together: of one process, or as sums over several."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from app.batch import Batch
from app.distributed.ddp import GradientSum

BUCKET_BYTES = 64 << 20


class Reduction(Protocol):
    """How the gradients of a step come together, which may take several rounds."""

    stepped: Sequence[nn.Parameter]  # by the optimizer of this process

    def begin(self) -> None:
        """A step: there are no gradients yet."""

    def rounds(self, batches: Sequence[Batch]) -> list[Sequence[Batch]]:
        """The micro-batches whose gradients come together at a time; as many rounds on every process."""

    def begin_again(self) -> None:
        """This process makes the gradients of the round once more, from the beginning."""

    def expect_last(self) -> None:
        """The next backward pass of this process is its last one of the round."""

    def finish(self) -> None:
        """The round: returns when all that this process steps has its gradient so far."""

    def gradients(self) -> list[Tensor]:
        """Those of the step, which parameters have from here on."""

    def agree(self, gradients: Sequence[Tensor]) -> None:
        """What is not finite at one process is not finite at any."""

    def norm(self, own: Tensor) -> Tensor:
        """Of all gradients, given that of this process's own."""

    def spread(self) -> None:
        """After the step of the optimizer: every process gets all weights."""


class _Everywhere:
    """Every process has all gradients, in the end, and makes every step."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.stepped = parameters

    def rounds(self, batches: Sequence[Batch]) -> list[Sequence[Batch]]:
        """One: gradients of micro-batches add up where they are made."""
        return [batches]

    def gradients(self) -> list[Tensor]:
        """Of parameters that got one."""
        return [parameter.grad for parameter in self.stepped if parameter.grad is not None]

    def agree(self, gradients: Sequence[Tensor]) -> None:
        """They are the same."""

    def norm(self, own: Tensor) -> Tensor:
        """These are all."""
        return own

    def spread(self) -> None:
        """All did the same with the same."""


class Alone(_Everywhere):
    """One process."""

    def begin(self) -> None:
        """Nothing is kept of the step before."""
        for parameter in self.stepped:
            parameter.grad = None

    begin_again = begin

    def expect_last(self) -> None:
        """Nobody waits for it."""

    def finish(self) -> None:
        """They are there."""


class Together(_Everywhere):
    """Several processes, each with all gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters)
        for parameter in parameters:
            torch.distributed.broadcast(parameter.data, 0)
        self._sum = GradientSum(parameters)
        self.begin = self.begin_again = self._sum.clear
        self.finish = self._sum.reduce

    def expect_last(self) -> None:
        """Nothing is sent before the reduction."""


def neighbours(parameters: Sequence[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """In the order in which gradients come, the last first: together those of one dtype, up to `limit` bytes."""
    groups: list[list[nn.Parameter]] = []
    size = 0
    for parameter in reversed(parameters):
        its = bytes_of(parameter)
        if not groups or size + its > limit or groups[-1][0].dtype != parameter.dtype:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += its
    return groups


def bytes_of(tensor: Tensor) -> int:
    """Also of one without memory."""
    return tensor.numel() * tensor.element_size()
