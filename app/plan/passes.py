"""Forward and backward of a step, and an evaluation: made in the trace of one optimizer, repeated in those of others.

What an optimizer keeps was there before these passes, and what its update takes comes after them, so in them the same
storages come and go in the same order. Not where weights are stepped within the backward pass.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from app.batch import Batch
from app.engine.step import Stepper
from app.plan.flops import FlopCounter, Flops
from app.plan.middle import Middle
from app.plan.whose import LayerCounter, Mark, Span


@dataclass(frozen=True, slots=True)
class _Gradient:
    """What stands for it where it was not made."""

    serial: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def made(self) -> Tensor:
        """Without numbers."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Forward and backward. `gradients`: of all that is trained, or none: they went into sums of before."""

    span: Span
    loss: int  # the serial of its sum
    gradients: tuple[_Gradient, ...]
    flops: Mapping[int, Flops]


class Passes:
    """Of one network and one shape."""

    def __init__(self) -> None:
        self.known: _Seen | None = None  # what can be repeated: gradients and loss are all that was left


class Evaluation:
    """Of one network and one shape, however much of it is recomputed in training."""

    def __init__(self) -> None:
        self._known: Span | None = None

    def make(self, counter: LayerCounter, scores: Callable[[], Any]) -> None:
        """Once."""
        if self._known is not None:
            counter.repeat(self._known, {})
            return
        mark = counter.mark()
        scores()
        span = counter.since(mark)
        if not span.left():
            self._known = span


class TracedStepper(Stepper):
    """The engine's own; forward and backward that are known already are repeated."""

    def watched(
        self, counter: LayerCounter, flops: FlopCounter, passes: Passes, among: Sequence[Middle]
    ) -> None:
        """Before its step."""
        self._counter, self._flops, self._passes, self._among = counter, flops, passes, among
        known = passes.known
        self._made = [] if known is None else [each.made() for each in known.gradients]
        self._loss = torch.zeros(())

    def _backward(self, batches: Sequence[Batch], weight: float) -> Tensor:
        known, counter = self._passes.known, self._counter
        if known is not None:
            return self._repeated(known)
        mark = counter.mark()
        total = super()._backward(batches, weight)
        self._passes.known = self._seen_since(mark, total)
        return total

    def _update(self) -> tuple[Tensor, Tensor]:
        self._counter.follow({each.sort: each.trained for each in self._among})
        try:
            return super()._update()
        finally:
            self._counter.stop_following()

    def _seen_since(self, mark: Mark, loss: Tensor) -> _Seen | None:
        """Unless more is left of it than loss and gradients, or less: parts of one storage cannot be told apart."""

        def within(tensor: Tensor) -> int:
            return (self._counter.serial_of(tensor) or 0) - mark.serial

        span, flops = self._counter.since(mark), self._flops
        given = [each.grad for each in self._parameters if each.grad is not None]
        gradients = tuple(_Gradient(within(g), tuple(g.shape), g.stride(), g.dtype) for g in given)
        left = sorted([within(loss), *(each.serial for each in gradients)])
        if len(gradients) not in (0, len(self._parameters)) or left != sorted(span.left()):
            return None
        return _Seen(span, within(loss), gradients, flops.counted())

    def _repeated(self, known: _Seen) -> Tensor:
        left = {known.loss: self._loss}
        if known.gradients:
            for parameter, gradient, made in zip(self._parameters, known.gradients, self._made, strict=True):
                parameter.grad = made
                left[gradient.serial] = made
        self._counter.repeat(known.span, left)
        self._made = []
        self._flops.found = {turn: replace(flops) for turn, flops in known.flops.items()}
        return self._loss
