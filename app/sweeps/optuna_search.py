"""Search by optuna's TPE, which chooses each trial from the outcomes of the earlier ones.

sweep.json is the only state. The study is built again for each trial: a study on disk could have a trial that a
killed sweep did not record, or a failure that a later start repaired.
"""

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config.groups import choices_by_group
from app.config.schema import RunConfig
from app.errors import ConfigError
from app.sweeps.grid import Setting
from app.sweeps.preset import SweepConfig
from app.sweeps.search_space import (
    Dimension,
    Range,
    as_read,
    compose_or_error,
    corners,
    multiply_out,
    parse_multiple,
    value_in,
)
from app.sweeps.trials import DRY_RUN, Outcome, Trial, key_of, name_of, value_of

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

STARTUP_TRIALS = 4  # random trials before TPE chooses; more would leave few of a dozen
_TRIAL_NUMBER_DIGITS = 3
_MAX_ATTEMPTS = 8  # to find an unused point; then the first unused one is taken


class Search:
    """Proposer of trials by TPE."""

    def __init__(self, dimensions: Sequence[Dimension], config: SweepConfig) -> None:
        self._given = tuple(d.texts[0] for d in dimensions if isinstance(d, Setting) and not d.is_swept)
        self._dimensions = [dimension for dimension in dimensions if dimension.is_swept]
        self._relative = {dimension.key for dimension in self._dimensions if dimension.is_relative}
        self._seed = config.seed
        self.count = int(min(config.trials, math.prod(map(_count, self._dimensions))))
        self._recalled: Sequence[Trial] = []
        combinations = as_read([(*self._given, *texts) for texts in corners(self._dimensions)], self._dimensions)
        self.points: Sequence[Trial] = [
            Trial(0, texts, self._swept(texts), "") for texts in multiply_out(combinations, self._relative)
        ]

    def recall(self, recorded: Sequence[Mapping[str, Any]], /) -> Sequence[Trial]:
        """The recorded trials as they were proposed then, without dry runs."""
        began = [each for each in recorded if each["status"] != DRY_RUN]
        if len(began) > self.count:
            raise ConfigError(
                f"sweep.trials={self.count}: this sweep has begun {len(began)} trials already. "
                f"Give sweep.trials={len(began)} or more."
            )
        self._recalled = [self._recorded(each) for each in began]
        return self._recalled

    def next(self, ended: Sequence[Outcome], /) -> Trial | None:
        """The next trial, which depends on the seed and the outcomes alone."""
        number = len(ended) + 1
        if number <= len(self._recalled):
            return self._recalled[number - 1]
        has_only_dry_runs = number > STARTUP_TRIALS and all(each.status == DRY_RUN for each in ended)
        if number > self.count or has_only_dry_runs:
            return None
        observed = [(each.proposed or {}, each.cost) for each in ended]
        first = self._first() if number == 1 else None
        return self._trial(number, first or suggest(self._dimensions, observed, seed=self._seed, number=number))

    def _trial(self, number: int, point: Mapping[str, Any]) -> Trial:
        texts = (d.text(point[d.key]) if isinstance(d, Range) else point[d.key] for d in self._dimensions)
        (overrides,) = multiply_out(as_read([(*self._given, *texts)], self._dimensions), self._relative)
        swept = self._swept(overrides)
        return Trial(number, overrides, swept, name_of(number, _TRIAL_NUMBER_DIGITS, swept), point)

    def _recorded(self, each: Mapping[str, Any]) -> Trial:
        swept = tuple(each["swept"])
        given = (text for text in self._given if key_of(text) not in self._relative)
        (overrides,) = as_read([(*given, *swept)], self._dimensions)
        return Trial(each["number"], overrides, swept, Path(each["folder"]).name, each["proposed"])

    def _swept(self, overrides: tuple[str, ...]) -> tuple[str, ...]:
        keys = [dimension.key for dimension in self._dimensions]
        return tuple(text for text in overrides if key_of(text) in keys)

    def _first(self) -> Mapping[str, Any] | None:
        """The run without the sweep, so that the best trial is never worse; None if it lies outside the space."""
        run = compose_or_error(self._given)
        assert isinstance(run, RunConfig)
        point = {dimension.key: _own_value(dimension, run) for dimension in self._dimensions}
        return None if None in point.values() else point


def suggest(
    dimensions: Sequence[Dimension],
    observed: Sequence[tuple[Mapping[str, Any], float | None]],
    *,
    seed: int,
    number: int,
    startup: int = STARTUP_TRIALS,
) -> Mapping[str, Any]:
    """A value for each dimension; `observed` are the earlier points with their objectives, None for a failure.

    Failures are reported to optuna as pruned, which TPE ranks last; it ignores failed trials and repeats them.
    """
    import optuna  # only here: slow to import
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {dimension.key: _distribution(dimension) for dimension in dimensions}
    earlier = [
        create_trial(
            params=dict(point),
            distributions=space,
            value=objective,
            state=TrialState.PRUNED if objective is None else TrialState.COMPLETE,
        )
        for point, objective in observed
    ]
    used = [point for point, _ in observed]
    for attempt in range(_MAX_ATTEMPTS):
        digest = hashlib.sha256(f"{seed} {number} {attempt}".encode()).digest()
        sampler = optuna.samplers.TPESampler(seed=int.from_bytes(digest[:4], "big"), n_startup_trials=startup)
        study = optuna.create_study(direction="minimize", sampler=sampler)
        study.add_trials(earlier)
        asked = study.ask(space).params
        point = {d.key: d.rounded(asked[d.key]) if isinstance(d, Range) else asked[d.key] for d in dimensions}
        if point not in used:
            return point
    keys = [each.key for each in dimensions]  # a continuous space has no used points
    every = (dict(zip(keys, values, strict=True)) for values in itertools.product(*map(_values, dimensions)))
    return next(point for point in every if point not in used)


def _distribution(dimension: Dimension) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(dimension, Setting):
        return CategoricalDistribution(dimension.texts)
    is_finite = math.isfinite(dimension.count)
    high = dimension.number(dimension.count - 1) if is_finite else dimension.high  # optuna warns of other ends of steps
    if dimension.is_whole:
        step = int(dimension.step or 1)
        return IntDistribution(int(dimension.low), int(high), log=dimension.log, step=step)
    return FloatDistribution(dimension.low, high, log=dimension.log, step=dimension.step)


def _count(dimension: Dimension) -> float:
    return len(dimension.texts) if isinstance(dimension, Setting) else dimension.count


def _values(dimension: Dimension) -> Sequence[Any]:
    return dimension.texts if isinstance(dimension, Setting) else [*map(dimension.number, range(int(dimension.count)))]


def _own_value(dimension: Dimension, run: RunConfig) -> Any:
    """The value of a run as one of the dimension; the first choice for a group, None if it lies outside."""
    own = 1.0 if dimension.is_relative else value_in(run, dimension.key)
    if isinstance(dimension, Range):
        return own if own is not None and dimension.has(own) else None
    meant = (lambda text: parse_multiple(text.partition("=")[2])) if dimension.is_relative else value_of
    default = dimension.texts[0] if dimension.key in choices_by_group() else None
    return next((text for text in dimension.texts if meant(text) == own), default)
