"""Results of comparisons before the first step: what was computed in two ways, and how far the two may differ."""

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
    """The relative difference that was found and the largest that is allowed."""

    what: str
    difference: float
    allowed: float

    @property
    def passed(self) -> bool:
        """False for NaN."""
        return self.difference <= self.allowed

    def or_refuse(self, refusal: str) -> Self:
        """Itself if it passed; else the run is refused."""
        if not self.passed:
            raise EnvironmentProblem(refusal)
        return self

    def or_leave(self, leave: Callable[[str], None]) -> list[Self]:
        """Itself if it passed; else nothing, and `leave`, given the cause, leaves out what was compared."""
        if not self.passed:
            leave(str(self))
        return [self] if self.passed else []

    def __str__(self) -> str:
        return f"{self.what} differs by {self.difference:.1e} (allowed {self.allowed:.1e})"


class Fault(Comparison):
    """A comparison that ended in an exception, of a kernel's compiler or of what that made: it does not pass."""

    def __str__(self) -> str:
        return self.what


def attempt(compare: Callable[[], Comparison], faults: type[Exception] | tuple[()], words: str = "{}") -> Comparison:
    """The comparison, or the fault that it ended in, within `words`."""
    try:
        return compare()
    except faults as fault:
        return Fault(words.format(gist(fault)), math.nan, 0.0)


def max_or_nan(differences: Iterable[float]) -> float:
    """The largest, or NaN where one of them is NaN: `max` passes over NaN unless it comes first."""
    values = list(differences)
    return math.nan if any(map(math.isnan, values)) else max(values)


def max_difference(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The largest relative difference of tensors, by their norms."""
    tiny = torch.finfo(torch.float32).tiny
    pairs = ((ours.float(), theirs.float()) for ours, theirs in zip(found, expected, strict=True))
    return max_or_nan(float((ours - theirs).norm() / theirs.norm().clamp_min(tiny)) for ours, theirs in pairs)


def compare_forwards(
    what: str,
    own: Callable[[Tensor], Any],
    ours: Callable[[Tensor], Any],
    x: Tensor,
    weights: Sequence[Tensor],
    updates: Sequence[Tensor],
    exact: float,
) -> Comparison:
    """Compare outputs and gradients of two forwards for the rows `x`, with every B of `updates` large enough that the
    adapter shows; `exact` is allowed in fp32.
    """
    kept = [b.detach().clone() for b in updates]
    try:
        with torch.no_grad():  # fixed values: a run's random numbers must not depend on comparisons
            for b in updates:
                places = torch.arange(b.numel(), device=b.device, dtype=torch.float32)
                b.copy_((torch.cos(places * 1.7) / b.shape[1] ** 0.5).view_as(b))
        theirs, found = (_outcome(forward, x, weights) for forward in (own, ours))
    finally:
        with torch.no_grad():
            for b, before in zip(updates, kept, strict=True):
                b.copy_(before)
    allowed = exact if x.dtype == torch.float32 else _ROUNDINGS * torch.finfo(x.dtype).eps
    return Comparison(what, max_difference(found, theirs), allowed)


def _outcome(forward: Callable[[Tensor], Any], x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        given = forward(leaf)
    outs = given if isinstance(given, tuple) else (given,)
    trained = [each for each in weights if each.requires_grad]
    places = [torch.arange(out.numel(), device=out.device).view_as(out) % 7 for out in outs]
    # gradients that are not parallel to the outputs: a norm would pass almost nothing of those
    losses = [(out.float() + place).cos().sum() for out, place in zip(outs, places, strict=True)]
    found = torch.autograd.grad(losses, [leaf, *trained])
    return [each.detach().double() for each in (*outs, *found)]
