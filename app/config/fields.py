"""Fields of the schema: what their values may be, as metadata that `app/config/validate.py` reads."""

from dataclasses import field
from typing import Any

from omegaconf import MISSING

CHOICES, LIMITS, SECTIONS, TYPE, TYPED_ONLY = "choices", "limits", "sections", "type", "typed_only"  # in metadata
# Values of TYPED_ONLY: why a key or section is taken from the command line only, never from a file or run folder
RUNS_CODE, STARTS_PROCESSES = "decides which code runs", "starts processes or threads"


class Epochs(str):
    """A text like `0.25epoch`."""


class TokenChoice(str):
    """The word `all` or `new`."""


class Balanced(str):
    """The text `balanced`."""


def choice(*names: str, default: str = MISSING) -> Any:
    """A text field that takes one of `names`."""
    return field(default=default, metadata={CHOICES: names})


def number(default: Any = MISSING, kind: Any = None, **limits: float) -> Any:
    """A number field within `limits`: at_least, at_most, above, below; of `kind` where its annotation cannot say it."""
    return field(default=default, metadata={LIMITS: limits} | ({TYPE: kind} if kind else {}))
