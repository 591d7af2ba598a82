"""Comparisons of two computations before the first step, and their allowed differences."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from app.errors import EnvironmentProblem, gist

_ROUNDINGS = 8  # of the dtype of the arithmetic: each side makes a few


@dataclass(frozen=True, slots=True)
class Comparison:
    """The measured relative difference and the largest allowed one."""

    what: str
    difference: float
    allowed: float

    @property
    def passed(self) -> bool:
        """False for NaN."""
        return self.difference <= self.allowed

    def or_refuse(self, refusal: str) -> Self:
        """Return the comparison if it passed; else refuse the run."""
        if not self.passed:
            raise EnvironmentProblem(refusal)
        return self

    def or_leave(self, leave: Callable[[str], None]) -> list[Self]:
        """Return the comparison if it passed; else nothing, and call `leave` with the cause."""
        if not self.passed:
            leave(str(self))
        return [self] if self.passed else []

    def __str__(self) -> str:
        return f"{self.what} differs by {self.difference:.1e} (allowed {self.allowed:.1e})"


class Fault(Comparison):
    """A comparison that raised, in a kernel or its compiler: it does not pass."""

    def __str__(self) -> str:
        return self.what


def attempt(compare: Callable[[], Comparison], faults: type[Exception] | tuple[()], words: str = "{}") -> Comparison:
    """Return the comparison, or a fault for an exception, formatted by `words`."""
    try:
        return compare()
    except faults as fault:
        return Fault(words.format(gist(fault)), math.nan, 0.0)


def max_or_nan(differences: Iterable[float]) -> float:
    """Return the largest value, or NaN if any is NaN: `max` ignores NaN unless it comes first."""
    values = list(differences)
    return math.nan if any(map(math.isnan, values)) else max(values)


def max_difference(results: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest relative difference of tensors, by their norms."""
    tiny = torch.finfo(torch.float32).tiny
    pairs = ((result.float(), target.float()) for result, target in zip(results, expected, strict=True))
    return max_or_nan(float((result - target).norm() / target.norm().clamp_min(tiny)) for result, target in pairs)


def compare_forwards(
    what: str,
    reference: Callable[[Tensor], Any],
    ours: Callable[[Tensor], Any],
    x: Tensor,
    weights: Sequence[Tensor],
    updates: Sequence[Tensor],
    exact: float,
) -> Comparison:
    """Compare outputs and gradients of two forwards for the rows `x`, with every B of `updates` large enough for a
    visible adapter; `exact` is allowed in fp32.
    """
    saved = [b.detach().clone() for b in updates]
    try:
        with torch.no_grad():  # fixed values: a run's random numbers must not depend on comparisons
            for b in updates:
                places = torch.arange(b.numel(), device=b.device, dtype=torch.float32)
                b.copy_((torch.cos(places * 1.7) / b.shape[1] ** 0.5).view_as(b))
        references, results = (_outcome(forward, x, weights) for forward in (reference, ours))
    finally:
        with torch.no_grad():
            for b, before in zip(updates, saved, strict=True):
                b.copy_(before)
    allowed = exact if x.dtype == torch.float32 else _ROUNDINGS * torch.finfo(x.dtype).eps
    return Comparison(what, max_difference(results, references), allowed)


def _outcome(forward: Callable[[Tensor], Any], x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        output = forward(leaf)
    outs = output if isinstance(output, tuple) else (output,)
    trained = [weight for weight in weights if weight.requires_grad]
    places = [torch.arange(out.numel(), device=out.device).view_as(out) % 7 for out in outs]
    # gradients that are not parallel to the outputs: a norm would pass almost none of those
    losses = [(out.float() + place).cos().sum() for out, place in zip(outs, places, strict=True)]
    gradients = torch.autograd.grad(losses, [leaf, *trained])
    return [tensor.detach().double() for tensor in (*outs, *gradients)]
