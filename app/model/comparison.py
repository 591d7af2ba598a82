"""Results of comparisons before the first step: what was computed in two ways, and how far the two may differ."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from app.errors import EnvironmentProblem, gist


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
    return max_or_nan(_relative(ours, theirs.float()) for ours, theirs in zip(found, expected, strict=True))


def _relative(found: Tensor, expected: Tensor) -> float:
    tiny = torch.finfo(torch.float32).tiny
    return float((found.float() - expected).norm() / expected.norm().clamp_min(tiny))
