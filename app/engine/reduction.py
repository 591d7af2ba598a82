"""Gradients of all processes added up, in buckets that never change: the same sums in every step of every start.

Not DistributedDataParallel: it deals gradients to other buckets after the first step, in which three processes sum in
another order, and a process that has run out of memory in a backward pass cannot do it over, because some of its
gradients are on their way already. Here a bucket is sent when the last backward pass of the step has filled it, in
an order that is the same everywhere; a process that starts over keeps what was sent and makes the rest again.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from app.batch import Batch

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
    """Several processes: sums over all of them, in the parameters' own order from the last to the first."""

    def __init__(self, parameters: Sequence[nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(parameters)
        self._buckets = [_Bucket(group) for group in neighbours(parameters, bucket_bytes)]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._last = False
        for parameter in parameters:
            torch.distributed.broadcast(parameter.data, 0)
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def begin(self) -> None:
        """Gradients are views of the buckets, so that they need no memory of their own."""
        for bucket in self._buckets:
            bucket.sent = None
        self.begin_again()

    def begin_again(self) -> None:
        """What is on its way is right as it is; what is made of it a second time goes nowhere."""
        self._last = False
        for bucket in self._buckets:
            bucket.clear()

    def expect_last(self) -> None:
        """From here on full buckets are sent."""
        self._last = True

    def finish(self) -> None:
        """Parameters that got no gradient here have none to add."""
        for bucket in self._buckets:
            bucket.send()
        for bucket in self._buckets:
            bucket.receive()

    def _arrived(self, parameter: nn.Parameter) -> None:
        if not self._last:
            return
        self._bucket_of[parameter].missing -= 1
        for bucket in self._buckets:  # in this order on every process, whatever fills up first
            if bucket.missing > 0:
                return
            bucket.send()


class _Bucket:
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        first = parameters[0]
        self._flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        pieces = self._flat.split([p.numel() for p in parameters])
        self._views: list[Tensor] = [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]
        self.sent: Any = None
        self.missing = len(parameters)

    def clear(self) -> None:
        if self.sent is not None:
            for parameter in self.parameters:
                parameter.grad = None
            return
        self.missing = len(self.parameters)
        self._flat.zero_()
        self._attach()

    def send(self) -> None:
        if self.sent is None:
            self.sent = torch.distributed.all_reduce(self._flat, async_op=True)

    def receive(self) -> None:
        self.sent.wait()
        self._attach()

    def _attach(self) -> None:
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view


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
