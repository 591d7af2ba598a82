"""Which trials a sweep makes, and in which order."""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Protocol

from app.sweep.expansion import Setting
from app.sweep.trial import Outcome, Trial, shown

_LONGEST_NAME = 96
_BRACKETS = re.compile(r"[\[\]{}()'\"]")
_UNSAFE = re.compile(r"[^\w.=,+-]+", re.ASCII)


class Proposer(Protocol):
    """A way to choose trials."""

    @property
    def fixed(self) -> Sequence[Trial]:
        """The trials that are known before the first one starts; all of them are checked then."""

    def next(self, ended: Sequence[Outcome], /) -> Trial | None:
        """The one to run now that the earlier ones have ended like this; None when there is no more."""


class Grid:
    """Every combination of the values; the last setting changes fastest."""

    def __init__(self, settings: Sequence[Setting]) -> None:
        is_swept = [setting.is_swept for setting in settings]
        combinations = list(itertools.product(*(setting.texts for setting in settings)))
        digits = len(str(len(combinations)))
        self.fixed: Sequence[Trial] = [
            Trial(number, overrides, swept, _name(number, digits, swept))
            for number, overrides in enumerate(combinations, 1)
            for swept in [tuple(itertools.compress(overrides, is_swept))]
        ]

    def next(self, ended: Sequence[Outcome], /) -> Trial | None:
        """One after the other."""
        return self.fixed[len(ended)] if len(ended) < len(self.fixed) else None


def _name(number: int, digits: int, swept: Sequence[str]) -> str:
    """For a folder, on any file system: the number makes it unique, the rest is for people and may be cut."""
    words = _UNSAFE.sub("_", _BRACKETS.sub("", shown(swept).replace(" ", ",")))
    return f"{number:0{digits}}-{words}"[:_LONGEST_NAME].rstrip("-._,")


PROPOSERS: dict[str, Callable[[Sequence[Setting]], Proposer]] = {"grid": Grid}
