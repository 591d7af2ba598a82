"""How the gradients of a step come together: of one process, as sums on each of several, or divided among them."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from app.distributed.ddp import GradientSum
from app.distributed.fsdp import Sharding, local, local_parameters


class Reduction(Protocol):
    """What a step asks of it, in this order."""

    stepped: Sequence[nn.Parameter]  # by the optimizer of this process
    can_repeat: bool  # whether a process may make passes again by itself

    def begin(self) -> None:
        """A step, or passes that are made again: there are no gradients yet."""

    def expect_last(self) -> None:
        """The next backward pass of this process is its last one of the step."""

    def finish(self) -> None:
        """Returns when all that this process steps has its gradient."""

    def gradients(self) -> list[Tensor]:
        """Those of the step, which `stepped` have from here on."""

    def total(self, squares: Tensor) -> Tensor:
        """Of all gradients, given that of this process's own."""


class Alone:
    """One process."""

    can_repeat = True

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.stepped = parameters

    def begin(self) -> None:
        """Nothing is kept of the step before."""
        for parameter in self.stepped:
            parameter.grad = None

    def expect_last(self) -> None:
        """Nothing is sent."""

    def finish(self) -> None:
        """They are there."""

    def gradients(self) -> list[Tensor]:
        """Of parameters that got one."""
        return [parameter.grad for parameter in self.stepped if parameter.grad is not None]

    def total(self, squares: Tensor) -> Tensor:
        """These are all."""
        return squares


class Together(Alone):
    """Several processes, each with the whole model and all gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters)
        for parameter in parameters:
            torch.distributed.broadcast(parameter.data, 0)
        self._sum = GradientSum(parameters)

    def begin(self) -> None:
        """Gradients are views of DDP's buckets."""
        self._sum.clear()

    def finish(self) -> None:
        """Sums over all processes."""
        self._sum.reduce()


class Divided:
    """Several processes that divide a model among them. `whole_matrices`: the optimizer looks at tensors as a whole."""

    can_repeat = False  # the others are in the middle of the same pass

    def __init__(
        self, parameters: Sequence[nn.Parameter], sharding: Sharding, *, whole_matrices: bool
    ) -> None:
        self._parameters = parameters
        self._sharding = sharding
        self.local = {} if whole_matrices else local_parameters(parameters)
        self.stepped: Sequence[nn.Parameter] = parameters if whole_matrices else list(self.local.values())

    def begin(self) -> None:
        """Nothing is kept of the step before."""
        for parameter in (*self._parameters, *self.stepped):
            parameter.grad = None
        self._sharding.begin_step()

    def expect_last(self) -> None:
        """Gradients are reduced by this pass at the latest."""
        self._sharding.expect_last()

    def finish(self) -> None:
        """The backward pass has waited for them."""

    def gradients(self) -> list[Tensor]:
        """The parts of them that this process keeps."""
        for parameter, own in self.local.items():
            own.grad = None if parameter.grad is None else local(parameter.grad)
        found = [local(each.grad) for each in self._parameters if each.grad is not None]
        return [each for each in found if each.numel()]

    def total(self, squares: Tensor) -> Tensor:
        """Over all processes that have a part of the model."""
        return self._sharding.total(squares)
