"""Scores of a fine-tuned model, its base or both on the same rows, with bootstrap intervals over the rows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.config.kinds import METRICS
from app.tasks.interface import ANSWERS, Counts, Sums
from app.tracking.formatting import align_columns
from app.tracking.output_dir import finite_or_none

RESAMPLES = 2_000
CONFIDENCE_LEVEL = 0.95
MAX_GROUPS = 2_048  # more clusters are drawn in groups, see `resampled`
RESAMPLES_AT_ONCE = 250  # their weights fit in the cache
_SEED = 0  # the same for all runs: equal rows get equal draws
_DIFFERENCE = "difference"

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A metric of these rows with its confidence interval; NaN if there is none."""

    value: float
    low: float
    high: float

    def text(self, form: str) -> str:
        value = f"{self.value:{form}}"
        if math.isnan(self.low) or math.isnan(self.high):
            return value
        return f"{value} [{self.low:{form}}, {self.high:{form}}]"


Side = dict[str, Interval]  # by metric


@dataclass(frozen=True, slots=True)
class ModelComparison:
    """Metrics of each side; with two sides, a third has the differences, tuned minus base."""

    sides: dict[str, Side]
    answers: int
    drawn_from: int

    @classmethod
    def of(cls, sums: Mapping[str, Sums], clusters: NDArray[np.uint64], counts: Counts) -> "ModelComparison":
        """Compare the sums of rows by `tuned`, `base` or both; both are resampled with the same rows."""
        number = len(np.unique(clusters))
        together = resampled(np.concatenate(list(sums.values()), axis=1), clusters)
        parts = np.split(together, len(sums), axis=1)
        values = {name: counts.metrics(of_side.sum(axis=0)) for name, of_side in sums.items()}
        draws = {name: counts.metrics(part) for name, part in zip(sums, parts, strict=True)}
        sides = {name: _estimates(values[name], draws[name], number) for name in sums}
        if len(sides) > 1:
            sides[_DIFFERENCE] = _differences(sides["tuned"], sides["base"], draws["tuned"], draws["base"])
        answers = int(next(iter(sums.values()))[:, ANSWERS].sum())
        return cls(sides, answers, number)

    def as_dict(self) -> dict[str, Any]:
        """Return values for JSON: the first side by plain names, and two sides also with prefixes."""
        first, *_ = self.sides.values()
        named = {f"{name}_{key}": value for name, side in self.sides.items() for key, value in _plain(side).items()}
        return {**_plain(first), **(named if len(self.sides) > 1 else {})}

    def table(self) -> str:
        """Return a text table, without metrics that are undefined for these rows."""
        order = [name for name in ("base", "tuned", _DIFFERENCE) if name in self.sides]
        lines = [["", *order]]
        for key, metric in METRICS.items():
            if key in self.sides[order[0]] and not all(math.isnan(self.sides[name][key].value) for name in order):
                forms = [f"+{metric.format}" if name == _DIFFERENCE else metric.format for name in order]
                lines.append(
                    [metric.label, *(self.sides[name][key].text(f) for name, f in zip(order, forms, strict=True))]
                )
        return f"{align_columns(lines)}\n{self._how()}"

    def _how(self) -> str:
        if self.drawn_from < 2:
            return "only one row: no confidence intervals"
        paired = ", paired" if len(self.sides) > 1 else ""
        return f"[{CONFIDENCE_LEVEL:.0%} intervals: {RESAMPLES:,} resamples of {self.drawn_from:,} rows{paired}]"


def _estimates(values: Mapping[str, Values], draws: Mapping[str, Values], count: int) -> Side:
    intervals = {}
    for key in values:
        value = float(values[key])
        low, high = (math.nan, math.nan) if count < 2 or math.isnan(value) else interval(draws[key])
        if low == high and METRICS[key].is_share and value in {0.0, 1.0}:
            # resampling equal rows shows no spread, although the next row may differ
            far = bound_of_none(count)
            low, high = max(0.0, value - far), min(1.0, value + far)
        intervals[key] = Interval(value, low, high)
    return intervals


def _differences(tuned: Side, base: Side, tuned_draws: Mapping[str, Values], base_draws: Mapping[str, Values]) -> Side:
    """Return paired differences, taken within each draw of rows, so that hard rows cancel."""
    intervals = {}
    for key in tuned:
        ours, theirs = tuned[key], base[key]
        with np.errstate(invalid="ignore"):  # infinity minus infinity
            value, draws = ours.value - theirs.value, tuned_draws[key] - base_draws[key]
        low, high = (math.nan, math.nan) if math.isnan(ours.low + theirs.low) else interval(draws)
        if low == high and METRICS[key].is_share and {ours.value, theirs.value} <= {0.0, 1.0}:
            low, high = ours.low - theirs.high, ours.high - theirs.low
        intervals[key] = Interval(value, low, high)
    return intervals


def _plain(side: Side) -> dict[str, Any]:
    values = {key: finite_or_none(metric.value) for key, metric in side.items()}
    bounds = {
        f"{key}_interval": [metric.low, metric.high]
        if math.isfinite(metric.low) and math.isfinite(metric.high)
        else None
        for key, metric in side.items()
    }
    return values | bounds


def resampled(sums: NDArray[np.float64], clusters: NDArray[np.uint64], groups: int = MAX_GROUPS) -> NDArray[np.float64]:
    """Return [RESAMPLES, columns]: sums over rows drawn with replacement, whole clusters at a time.

    `clusters` are hashes, so their order is random but independent of the order of rows in a file. Many clusters are
    drawn in `groups` of neighbors: sums over many rows have the same spread, at a bounded cost.
    """
    names, cluster = np.unique(clusters, return_inverse=True)
    of_group = cluster * min(groups, len(names)) // len(names)
    drawn = np.stack([np.bincount(of_group, weights=column) for column in sums.T], axis=1)
    count, random = len(drawn), np.random.default_rng(_SEED)
    parts = []
    for _ in range(RESAMPLES // RESAMPLES_AT_ONCE):
        chosen = random.integers(0, count, size=(RESAMPLES_AT_ONCE, count), dtype=np.int32)
        chosen += np.arange(RESAMPLES_AT_ONCE, dtype=np.int32)[:, None] * count
        times = np.bincount(chosen.ravel(), minlength=RESAMPLES_AT_ONCE * count).reshape(RESAMPLES_AT_ONCE, count)
        with np.errstate(invalid="ignore"):  # a loss may be infinite
            parts.append(times.astype(np.float64) @ drawn)
    return np.concatenate(parts)


def interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the central interval with CONFIDENCE_LEVEL of the values."""
    ordered = np.sort(values)
    outside = round(len(ordered) * (1 - CONFIDENCE_LEVEL) / 2)
    return float(ordered[outside - 1]), float(ordered[-outside])


def bound_of_none(clusters: int) -> float:
    """Return the upper confidence bound of a share without a hit in `clusters` draws."""
    return float(1 - ((1 - CONFIDENCE_LEVEL) / 2) ** (1 / clusters))
