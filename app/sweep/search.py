"""A search: each trial is chosen from how the earlier ones ended (TPE, by optuna)."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.config.groups import choices_by_group
from app.errors import ConfigError
from app.sweep.expansion import Setting
from app.sweep.preset import SweepConfig
from app.sweep.relative import runs_of, settled, value_in
from app.sweep.space import Dimension, Range, ends, times
from app.sweep.trial import DRY_RUN, Outcome, Trial, key_of, name_of, value_of

STARTUP = 4  # trials before the first one that is chosen; more would leave little of a dozen
_DIGITS = 3  # of a trial's number: there may be more trials later
_MOST_POINTS = 32  # that are composed to check a space, at a hundredth of a second each


class Search:
    """What sweep.json says of the earlier trials is its whole memory: nothing else is kept, so nothing can disagree."""

    def __init__(self, dimensions: Sequence[Dimension], config: SweepConfig) -> None:
        self._given = tuple(d.texts[0] for d in dimensions if isinstance(d, Setting) and not d.is_swept)
        self._dimensions = [dimension for dimension in dimensions if dimension.is_swept]
        self._relative = {dimension.key for dimension in self._dimensions if dimension.is_relative}
        self._seed = config.seed or 0
        self.count = config.trials or 0
        self._recalled: Sequence[Trial] = []
        self._require_enough()
        combinations = [(*self._given, *texts) for texts in ends(self._dimensions, _MOST_POINTS)]
        self.points = [
            Trial(0, texts, self._swept(texts), "") for texts in settled(combinations, self._relative)
        ]

    def recall(self, recorded: Sequence[Mapping[str, Any]], /) -> Sequence[Trial]:
        """As they were proposed: how the ones before them ended may be otherwise by now. Without plans at the end."""
        plans = itertools.takewhile(lambda each: each["status"] == DRY_RUN, reversed(recorded))
        began = recorded[: len(recorded) - len(list(plans))]
        if len(began) > self.count:
            raise ConfigError(
                f"sweep.trials={self.count}: this sweep has begun {len(began)} trials already. "
                f"Give sweep.trials={len(began)} or more."
            )
        self._recalled = [self._recorded(each) for each in began]
        return self._recalled

    def next(self, ended: Sequence[Outcome], /) -> Trial | None:
        """The same for the same seed and the same outcomes, in one start or in several."""
        number = len(ended) + 1
        if number <= len(self._recalled):
            return self._recalled[number - 1]
        has_only_plans = number > STARTUP and all(each.status == DRY_RUN for each in ended)
        if number > self.count or has_only_plans:
            return None
        first = self._first() if number == 1 else None
        return self._trial(number, first or self._chosen(number, ended))

    def _chosen(self, number: int, ended: Sequence[Outcome]) -> Mapping[str, Any]:
        from app.sweep.tpe import chosen  # loads optuna, which nobody needs whose command is wrong

        told = [(each.proposed or {}, each.objective) for each in ended]
        return chosen(self._dimensions, told, seed=self._seed, number=number, startup=STARTUP)

    def _trial(self, number: int, point: Mapping[str, Any]) -> Trial:
        texts = (
            dimension.text(point[dimension.key]) if isinstance(dimension, Range) else point[dimension.key]
            for dimension in self._dimensions
        )
        (overrides,) = settled([(*self._given, *texts)], self._relative)
        swept = self._swept(overrides)
        return Trial(number, overrides, swept, name_of(number, _DIGITS, swept), point)

    def _recorded(self, each: Mapping[str, Any]) -> Trial:
        swept = tuple(each["swept"])
        given = (text for text in self._given if key_of(text) not in self._relative)
        return Trial(each["number"], (*given, *swept), swept, Path(each["folder"]).name, each["proposed"])

    def _swept(self, overrides: tuple[str, ...]) -> tuple[str, ...]:
        return overrides[len(overrides) - len(self._dimensions) :]

    def _first(self) -> Mapping[str, Any] | None:
        """The run without the sweep, so that the best one is never worse; None when that lies outside."""
        (run,) = runs_of([self._given])
        groups = {
            d.key: _place(d, value_in(run, d.key)) or d.texts[0]
            for d in self._dimensions
            if d.key in choices_by_group()
        }
        (run,) = runs_of([(*self._given, *groups.values())])
        point = {d.key: groups.get(d.key) or _place(d, value_in(run, d.key)) for d in self._dimensions}
        return None if None in point.values() else point

    def _require_enough(self) -> None:
        sizes = [len(d.texts) if isinstance(d, Setting) else d.count for d in self._dimensions]
        known = [size for size in sizes if size is not None]
        if len(known) == len(sizes) and math.prod(known) < self.count:
            raise ConfigError(
                f"sweep.trials={self.count}: the space has {math.prod(known)} combinations. "
                f"Give sweep.trials={math.prod(known)} or less."
            )


def _place(dimension: Dimension, value: Any) -> Any:
    """Where in a dimension the value of a run lies; None when it does not."""
    if isinstance(dimension, Setting):
        wanted = 1.0 if dimension.is_relative else value
        same = (text for text in dimension.texts if _meant(text, dimension) == wanted)
        return next(same, None)
    number = 1.0 if dimension.is_relative else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    return number if dimension.has(number) else None


def _meant(text: str, setting: Setting) -> Any:
    return times(text.partition("=")[2]) if setting.is_relative else value_of(text)
