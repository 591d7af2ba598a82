"""Scores of one model, or of a tuned one and its base on the same rows, each with how far other rows would move it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.evaluation.bootstrap import LEVEL, RESAMPLES, bound_of_none, interval, num_clusters, resampled
from app.tracking.formatting import align_columns
from app.tracking.jsonl_metrics import finite_or_none
from app.training.scores import ANSWERS, Sums, figures

_SHARES = ("token_accuracy", "exact_match", "accuracy", "macro_f1")
_WORDS: dict[str, tuple[str, Callable[[float], str]]] = {
    "eval_loss": ("loss", "{:.4f}".format),
    "perplexity": ("perplexity", "{:.4g}".format),
    "token_accuracy": ("token accuracy", "{:.2%}".format),
    "exact_match": ("exact match", "{:.2%}".format),
    "accuracy": ("accuracy", "{:.2%}".format),
    "macro_f1": ("macro F1", "{:.2%}".format),
}
_DIFFERENCE = "difference"

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure of these rows, and between which figures it would lie for most draws of as many; NaN: nobody knows."""

    value: float
    low: float
    high: float

    def words(self, form: Callable[[float], str]) -> str:
        """For people."""
        if math.isnan(self.low) or math.isnan(self.high):
            return form(self.value)
        return f"{form(self.value)} [{form(self.low)}, {form(self.high)}]"


Side = dict[str, Estimate]  # by the keys of figures


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Of each side its figures by their keys; with two sides there is a third one, the tuned model less its base."""

    sides: dict[str, Side]
    answers: int
    drawn_from: int

    @classmethod
    def of(cls, sums: Mapping[str, Sums], clusters: NDArray[np.uint64]) -> "SideBySide":
        """Sums of rows by `tuned` or `base` or both. Both are drawn with the same rows each time."""
        count = num_clusters(clusters)
        together = resampled(np.concatenate(list(sums.values()), axis=1), clusters)
        parts = np.split(together, len(sums), axis=1)
        values = {name: figures(each.sum(axis=0)) for name, each in sums.items()}
        draws = {name: figures(part) for name, part in zip(sums, parts, strict=True)}
        sides = {name: _estimates(values[name], draws[name], count) for name in sums}
        if len(sides) > 1:
            sides[_DIFFERENCE] = _differences(sides["tuned"], sides["base"], draws["tuned"], draws["base"])
        answers = int(next(iter(sums.values()))[:, ANSWERS].sum())
        return cls(sides, answers, count)

    def as_dict(self) -> dict[str, Any]:
        """For json: the first side by plain names, and where there are two each by its own."""
        first, *_ = self.sides.values()
        named = {
            f"{name}_{key}": value for name, side in self.sides.items() for key, value in _plain(side).items()
        }
        return {**_plain(first), **(named if len(self.sides) > 1 else {})}

    def table(self) -> str:
        """For people; figures that have no meaning for these rows are left out."""
        order = [name for name in ("base", "tuned", _DIFFERENCE) if name in self.sides]
        lines = [["", *order]]
        for key, (word, form) in _WORDS.items():
            if key in self.sides[order[0]] and not all(
                math.isnan(self.sides[name][key].value) for name in order
            ):
                forms = [_signed(form) if name == _DIFFERENCE else form for name in order]
                lines.append(
                    [word, *(self.sides[name][key].words(f) for name, f in zip(order, forms, strict=True))]
                )
        return f"{align_columns(lines)}\n{self._how()}"

    def _how(self) -> str:
        if self.drawn_from < 2:
            return "one row alone says nothing of others: no intervals"
        paired = ", the same ones for both" if len(self.sides) > 1 else ""
        return f"[{LEVEL:.0%} intervals: {RESAMPLES:,} draws of {self.drawn_from:,} rows{paired}]"


def _estimates(values: Mapping[str, Values], draws: Mapping[str, Values], count: int) -> Side:
    found = {}
    for key in values:
        value = float(values[key])
        low, high = (math.nan, math.nan) if count < 2 or math.isnan(value) else interval(draws[key])
        if low == high and key in _SHARES and value in {0.0, 1.0}:
            # all rows alike: drawing them again shows no spread, and yet the next one may be another
            far = bound_of_none(count)
            low, high = max(0.0, value - far), min(1.0, value + far)
        found[key] = Estimate(value, low, high)
    return found


def _differences(
    tuned: Side, base: Side, tuned_draws: Mapping[str, Values], base_draws: Mapping[str, Values]
) -> Side:
    """Of each draw of rows, so that what makes rows hard for both cancels."""
    found = {}
    for key in tuned:
        ours, theirs = tuned[key], base[key]
        with np.errstate(invalid="ignore"):  # of two infinities
            value, draws = ours.value - theirs.value, tuned_draws[key] - base_draws[key]
        low, high = (math.nan, math.nan) if math.isnan(ours.low + theirs.low) else interval(draws)
        if low == high and key in _SHARES and {ours.value, theirs.value} <= {0.0, 1.0}:
            low, high = ours.low - theirs.high, ours.high - theirs.low
        found[key] = Estimate(value, low, high)
    return found


def _plain(side: Side) -> dict[str, Any]:
    """All figures, then all intervals."""
    values = {key: finite_or_none(each.value) for key, each in side.items()}
    return values | {f"{key}_interval": _bounds(each) for key, each in side.items()}


def _bounds(each: Estimate) -> list[float] | None:
    return [each.low, each.high] if math.isfinite(each.low) and math.isfinite(each.high) else None


def _signed(form: Callable[[float], str]) -> Callable[[float], str]:
    return partial(_with_sign, form)


def _with_sign(form: Callable[[float], str], value: float) -> str:
    return f"+{form(value)}" if value > 0 else form(value)
