"""One run of a sweep: what it is told, and how it ended."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

PENDING, RUNNING, FAILED, STOPPED = "pending", "running", "failed", "stopped"
FINISHED, DRY_RUN = "finished", "dry_run"
_LONGEST_NAME = 96
_BRACKETS = re.compile(r"[\[\]{}()'\"]")
_UNSAFE = re.compile(r"[^\w.=,+-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Trial:
    """`overrides` are all it is told, `swept` those in which trials differ, `name` is that of its folder.

    `proposed` is the point of a space that a search chose, in the search's own terms. Number 0 is a point that is only
    checked, not run.
    """

    number: int
    overrides: tuple[str, ...]
    swept: tuple[str, ...]
    name: str
    proposed: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A trial as it stands in sweep.json. `values` has what is swept, typed; `seconds` are those of all its starts."""

    number: int
    overrides: Sequence[str]
    swept: Sequence[str]
    folder: str
    values: Mapping[str, Any] = field(default_factory=dict)
    proposed: Mapping[str, Any] | None = None
    status: str = PENDING
    objective: float | None = None
    steps: int | None = None
    tokens_per_second: float | None = None
    seconds: float = 0.0
    exit_code: int | None = None
    error: str | None = None


def shown(swept: Sequence[str]) -> str:
    """What is special about a trial, for people."""
    return " ".join(text.lstrip("+") for text in swept)


def name_of(number: int, digits: int, swept: Sequence[str]) -> str:
    """For a folder, on any file system: the number makes it unique, the rest is for people and may be cut."""
    words = _UNSAFE.sub("_", _BRACKETS.sub("", shown(swept).replace(" ", ",")))
    return f"{number:0{digits}}-{words}"[:_LONGEST_NAME].rstrip("-._,")


def key_of(text: str) -> str:
    """Of an override, without the prefix that says how it is set."""
    return text.partition("=")[0].lstrip("+~")


def values_of(overrides: Sequence[str]) -> dict[str, Any]:
    """By key, as numbers, lists and text."""
    return {key_of(text): value_of(text) for text in overrides}


@cache
def value_of(text: str) -> Any:
    """As Hydra reads it; what needs quotes is text, and what JSON has no number for."""
    try:
        value = OverridesParser.create().parse_override(text).value()
    except HydraException:
        return text.partition("=")[2]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
