"""Which trials a sweep makes, and in which order."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

from app.errors import ConfigError
from app.sweep.expansion import Setting
from app.sweep.preset import NO_PRESET, SweepConfig
from app.sweep.relative import settled
from app.sweep.search import Search
from app.sweep.space import Dimension, Range
from app.sweep.trial import Outcome, Trial, key_of, name_of


class Proposer(Protocol):
    """A way to choose trials."""

    @property
    def points(self) -> Sequence[Trial]:
        """What is checked before the first trial starts: the trials themselves, or the ends of what they may be."""

    @property
    def count(self) -> int:
        """How many trials it makes in all."""

    def recall(self, recorded: Sequence[Mapping[str, Any]], /) -> Sequence[Trial]:
        """The trials that are known before the first one starts, with those that sweep.json has of earlier starts."""

    def next(self, ended: Sequence[Outcome], /) -> Trial | None:
        """The one to run now that the earlier ones have ended like this; None when there is no more."""


class Grid:
    """Every combination of the values; the last setting changes fastest."""

    def __init__(self, dimensions: Sequence[Dimension], _config: SweepConfig = NO_PRESET.config) -> None:
        settings = [each for each in dimensions if isinstance(each, Setting)]
        _refuse_ranges([each for each in dimensions if isinstance(each, Range)])
        varied = {setting.key for setting in settings if setting.is_swept or setting.is_relative}
        relative = {setting.key for setting in settings if setting.is_relative}
        combinations = settled(list(itertools.product(*(setting.texts for setting in settings))), relative)
        digits = len(str(len(combinations)))
        self.points: Sequence[Trial] = [
            Trial(number, overrides, swept, name_of(number, digits, swept))
            for number, overrides in enumerate(combinations, 1)
            for swept in [tuple(text for text in overrides if key_of(text) in varied)]
        ]

    @property
    def count(self) -> int:
        """As many as there are combinations."""
        return len(self.points)

    def recall(self, _recorded: Sequence[Mapping[str, Any]], /) -> Sequence[Trial]:
        """All of them: they depend on the command alone."""
        return self.points

    def next(self, ended: Sequence[Outcome], /) -> Trial | None:
        """One after the other."""
        return self.points[len(ended)] if len(ended) < len(self.points) else None


@dataclass(frozen=True, slots=True)
class ProposerKind:
    """How it is made, and what keeps it from being made here."""

    make: Callable[[Sequence[Dimension], SweepConfig], Proposer]
    check: Callable[[], list[str]] = list


def _refuse_ranges(ranges: Sequence[Range]) -> None:
    if ranges:
        raise ConfigError(
            [
                f"sweep.space.{each.key}: a range has no list of values. Give values, [a, b], or choose sweep=optuna."
                for each in ranges
            ]
        )


def _check_optuna() -> list[str]:
    if find_spec("optuna") is None:
        return [
            "sweep=optuna needs the package optuna, which is not installed: "
            "pip install optuna, or list the values yourself: -m optimizer.lr=1e-3,3e-4"
        ]
    return []


PROPOSERS: dict[str, ProposerKind] = {
    "grid": ProposerKind(Grid),
    "tpe": ProposerKind(Search, _check_optuna),
}
