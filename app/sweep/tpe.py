"""The next point of a search by optuna's TPE: a function of the space, the seed and the earlier points alone.

The study is built anew for each trial and lives in memory. One on disk would be a second truth beside sweep.json: it
would know a trial that is not recorded there when the sweep was killed in between, and a failure that is mended by now.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, TrialState, create_trial

from app.sweep.expansion import Setting
from app.sweep.space import Dimension, Range

_TRIES = 8  # to find a point that is not there yet; then the first one that is not is taken


def chosen(
    dimensions: Sequence[Dimension],
    told: Sequence[tuple[Mapping[str, Any], float | None]],
    *,
    seed: int,
    number: int,
    startup: int,
) -> Mapping[str, Any]:
    """A value for each dimension; `told` are the earlier points with their objectives, None for what failed."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {dimension.key: _distribution(dimension) for dimension in dimensions}
    earlier = [_told(point, objective, space) for point, objective in told]
    for attempt in range(_TRIES):
        sampler = optuna.samplers.TPESampler(seed=_seed(seed, number, attempt), n_startup_trials=startup)
        study = optuna.create_study(direction="minimize", sampler=sampler)
        study.add_trials(earlier)
        point = _rounded(study.ask(space).params, dimensions)
        if all(point != before for before, _ in told):
            return point
    return _first_unused(dimensions, [before for before, _ in told]) or point


def _told(
    point: Mapping[str, Any], objective: float | None, space: dict[str, BaseDistribution]
) -> FrozenTrial:
    """What failed is told as pruned, which TPE ranks last; what it is told as failed it forgets, and goes there."""
    state = TrialState.PRUNED if objective is None else TrialState.COMPLETE
    return create_trial(params=dict(point), distributions=space, value=objective, state=state)


def _distribution(dimension: Dimension) -> BaseDistribution:
    if isinstance(dimension, Setting):
        return CategoricalDistribution(dimension.texts)
    numbers = dimension.numbers()
    high = numbers[-1] if numbers else dimension.high  # optuna warns of steps that do not end there
    if dimension.is_whole:
        step = int(dimension.step or 1)
        return IntDistribution(int(dimension.low), int(high), log=dimension.log, step=step)
    return FloatDistribution(dimension.low, high, log=dimension.log, step=dimension.step)


def _rounded(point: Mapping[str, Any], dimensions: Sequence[Dimension]) -> dict[str, Any]:
    return {
        each.key: each.rounded(point[each.key]) if isinstance(each, Range) else point[each.key]
        for each in dimensions
    }


def _first_unused(
    dimensions: Sequence[Dimension], used: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """None in a space that has no end."""
    values = [list(each.texts) if isinstance(each, Setting) else each.numbers() for each in dimensions]
    keys = [each.key for each in dimensions]
    every = (dict(zip(keys, combination, strict=True)) for combination in itertools.product(*values))
    return next((point for point in every if point not in used), None)


def _seed(seed: int, number: int, attempt: int) -> int:
    """Of 32 bits, unlike for each trial."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number} {attempt}".encode()).digest()[:4], "big")
