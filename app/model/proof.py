"""What a check before the first step found, kept with the run."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Proof:
    """`difference` is relative; the run is refused where it is more than `allowed`."""

    what: str
    difference: float
    allowed: float

    @property
    def holds(self) -> bool:
        """False for what is not a number."""
        return self.difference <= self.allowed


def worst(differences: Iterable[float]) -> float:
    """The largest; not a number where one of them is none, which `max` passes over unless it comes first."""
    found = list(differences)
    return math.nan if any(map(math.isnan, found)) else max(found)


def furthest(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The largest relative difference of tensors."""
    return worst(_apart(ours, theirs.float()) for ours, theirs in zip(found, expected, strict=True))


def _apart(found: Tensor, expected: Tensor) -> float:
    tiny = torch.finfo(torch.float32).tiny
    return float((found.float() - expected).norm() / expected.norm().clamp_min(tiny))


def reason(fault: Exception) -> str:
    """What was raised, in a line; a compiler's message begins with the place in its source."""
    told = str(getattr(fault, "error_message", None) or fault).strip().partition("\n")[0][:200]
    return f"{type(fault).__name__}: {told}"
