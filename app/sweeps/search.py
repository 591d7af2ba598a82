"""Search by optuna's TPE.

sweep.json is the only state. The study is rebuilt for each trial: a study on disk could have a trial that a killed
sweep did not record, or a failure that a later start repaired.
"""

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config.conf_files import choices_by_group
from app.config.schema import RunConfig
from app.errors import ConfigError
from app.sweeps.search_space import (
    Dimension,
    Range,
    Setting,
    SweepConfig,
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
        self._fixed = tuple(d.texts[0] for d in dimensions if isinstance(d, Setting) and not d.is_swept)
        self._dimensions = [dimension for dimension in dimensions if dimension.is_swept]
        self._relative = {dimension.key for dimension in self._dimensions if dimension.is_relative}
        self._seed = config.seed
        self.count = int(min(config.trials, math.prod(map(_count, self._dimensions))))
        self._recalled: Sequence[Trial] = []
        combinations = as_read([(*self._fixed, *texts) for texts in corners(self._dimensions)], self._dimensions)
        self.points: Sequence[Trial] = [
            Trial(0, texts, self._swept(texts), "") for texts in multiply_out(combinations, self._relative)
        ]

    def recall(self, recorded: Sequence[Mapping[str, Any]], /) -> Sequence[Trial]:
        """Return the recorded trials as proposed, without dry runs."""
        started = [trial for trial in recorded if trial["status"] != DRY_RUN]
        if len(started) > self.count:
            raise ConfigError(
                f"sweep.trials={self.count}: this sweep has already started {len(started)} trials. "
                f"Set sweep.trials={len(started)} or more."
            )
        self._recalled = [self._recorded(trial) for trial in started]
        return self._recalled

    def next(self, ended: Sequence[Outcome], /) -> Trial | None:
        """Return the next trial, which depends only on the seed and the outcomes."""
        number = len(ended) + 1
        if number <= len(self._recalled):
            return self._recalled[number - 1]
        has_only_dry_runs = number > STARTUP_TRIALS and all(outcome.status == DRY_RUN for outcome in ended)
        if number > self.count or has_only_dry_runs:
            return None
        observed = [(outcome.proposed or {}, outcome.cost) for outcome in ended]
        first = self._first() if number == 1 else None
        return self._trial(number, first or suggest(self._dimensions, observed, seed=self._seed, number=number))

    def _trial(self, number: int, point: Mapping[str, Any]) -> Trial:
        texts = (d.text(point[d.key]) if isinstance(d, Range) else point[d.key] for d in self._dimensions)
        (overrides,) = multiply_out(as_read([(*self._fixed, *texts)], self._dimensions), self._relative)
        swept = self._swept(overrides)
        return Trial(number, overrides, swept, name_of(number, _TRIAL_NUMBER_DIGITS, swept), point)

    def _recorded(self, trial: Mapping[str, Any]) -> Trial:
        swept = tuple(trial["swept"])
        fixed = (text for text in self._fixed if key_of(text) not in self._relative)
        (overrides,) = as_read([(*fixed, *swept)], self._dimensions)
        return Trial(trial["number"], overrides, swept, Path(trial["folder"]).name, trial["proposed"])

    def _swept(self, overrides: tuple[str, ...]) -> tuple[str, ...]:
        keys = [dimension.key for dimension in self._dimensions]
        return tuple(text for text in overrides if key_of(text) in keys)

    def _first(self) -> Mapping[str, Any] | None:
        """Return the values of the run without the sweep, so that the best trial is never worse; None if outside."""
        run = compose_or_error(self._fixed)
        assert isinstance(run, RunConfig)
        point = {dimension.key: _run_value(dimension, run) for dimension in self._dimensions}
        return None if None in point.values() else point


def suggest(
    dimensions: Sequence[Dimension],
    observed: Sequence[tuple[Mapping[str, Any], float | None]],
    *,
    seed: int,
    number: int,
    startup: int = STARTUP_TRIALS,
) -> Mapping[str, Any]:
    """Return a value for each dimension; `observed` has earlier points with their objectives, None for a failure.

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
        params = study.ask(space).params
        point = {d.key: d.rounded(params[d.key]) if isinstance(d, Range) else params[d.key] for d in dimensions}
        if point not in used:
            return point
    keys = [dimension.key for dimension in dimensions]  # a continuous space has no used points
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


def _run_value(dimension: Dimension, run: RunConfig) -> Any:
    """Return the value of the run in the dimension; the first choice for a group, None if outside."""
    value = 1.0 if dimension.is_relative else value_in(run, dimension.key)
    if isinstance(dimension, Range):
        return value if value is not None and dimension.has(value) else None
    parse = (lambda text: parse_multiple(text.partition("=")[2])) if dimension.is_relative else value_of
    default = dimension.texts[0] if dimension.key in choices_by_group() else None
    return next((text for text in dimension.texts if parse(text) == value), default)
