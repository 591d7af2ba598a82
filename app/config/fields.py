"""What a field of the schema can say of itself: its choices, its limits."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

CHOICES = "choices"
LIMITS = "limits"
SECTIONS = "sections"


@dataclass(frozen=True, slots=True)
class Limits:
    """The range that a number must lie in; `None` is open."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None


def choice(*names: str, default: str = MISSING) -> Any:
    """A text field that takes one of `names`."""
    return field(default=default, metadata={CHOICES: names})


def number(default: Any = MISSING, **limits: float) -> Any:
    """A number field within `limits` (the fields of `Limits`)."""
    return field(default=default, metadata={LIMITS: Limits(**limits)})
