"""The knobs that bring a run into less memory, each planned again, so that what it saves is no guess."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

from app.config.schema import RunConfig
from app.errors import ConfigError
from app.plan.forked import shared_out
from app.plan.knobs import LEARNING, Knob, candidates, turned, words_of
from app.plan.look import Look, Looked
from app.plan.runs import Runs
from app.plan.speed import seconds_per_token

_AS_FAST = 0.005  # a difference in time that is none
_LITTLE = 0.01  # of what is too much


@dataclass(frozen=True, slots=True)
class Turned:
    """A knob and what it does. `slower_by` is a share of the time of a token: 0.33 is a third more."""

    knob: Knob
    saves_bytes: int
    slower_by: float
    fits: bool


@dataclass(frozen=True, slots=True)
class _Tried:
    """Settings that were planned and judged."""

    needed_bytes: int
    fits: bool
    seconds: float  # of a token

    @classmethod
    def of(cls, looked: Looked, look: Look) -> "_Tried":
        seconds = seconds_per_token(looked.run, looked.plan, looked.shape.tokens, look.machine)
        return cls(looked.verdict.needed_bytes, looked.verdict.fits, seconds)


class Turning:
    """Of one command line."""

    def __init__(self, look: Look, runs: Runs | None = None) -> None:
        self._look = look
        self._runs = runs or Runs()

    def knobs(self, now: Looked) -> list[Turned]:
        """Those that save memory, the cheapest first."""
        knobs = candidates(now.run, self._look.processes)
        others = [each for each in knobs if each.makes_another_network]  # one process loads what these need
        parts = [others, *([each] for each in reversed(knobs) if each not in others)]  # the longest first
        if any(each.costs < LEARNING for each in others):
            # a copy begins with the first, and what may go together is best known here
            parts[:2] = parts[1::-1]
        self._runs.arrive()
        found_by_all = shared_out(partial(self._each_tried, now), parts)
        tried = {knob: found for part in found_by_all for knob, found in part.items()}
        found = (_turned(each, tried[each], _Tried.of(now, self._look)) for each in knobs)
        return sorted((each for each in found if each is not None), key=_cost)

    def together(self, now: Looked, knobs: Sequence[Turned]) -> dict[str, Any] | None:
        """About as few as fit, the cheapest first: as many as save enough if savings add up, or more, found by halving.

        Where one is enough alone, only of those that cost less; what saves next to nothing comes last.
        """
        too_much = now.verdict.needed_bytes - now.verdict.memory_bytes
        enough = min((each.knob.costs for each in knobs if each.fits), default=LEARNING + 1)
        knobs = [each for each in knobs if each.knob.costs < enough]
        knobs.sort(key=lambda each: each.saves_bytes < _LITTLE * too_much)
        chosen = that_go_together(self._look.overrides, knobs, self._runs) if len(knobs) > 1 else []
        if len(chosen) < 2:
            return None
        found = _fewest(partial(self._first_tried, now, chosen), *_between(chosen, too_much))
        if found is None:
            return None
        count, tried = found
        words = words_of([each.knob for each in chosen[:count]])
        return {"override": " ".join(words), "needed_bytes": tried.needed_bytes}

    def run(self, now: Looked, *knobs: Knob) -> RunConfig | None:
        """None where they do not go with what was typed. Bins that were found stay as they are."""
        run = self._runs.of(turned(self._look.overrides, knobs))
        if run is None or not now.chosen_bins:
            return run
        set_by_knobs = {key for knob in knobs for key in knob.sets}
        found: dict[str, Any] = {
            "tokens": now.run.batching.tokens,
            "accumulation": now.run.batching.accumulation,
        }
        kept = {name: size for name, size in found.items() if f"batching.{name}" not in set_by_knobs}
        return replace(run, batching=replace(run.batching, **kept))

    def _each_tried(self, now: Looked, knobs: Sequence[Knob]) -> dict[Knob, _Tried | None]:
        return {knob: self._tried(now, knob) for knob in knobs}

    def _first_tried(self, now: Looked, chosen: Sequence[Turned], count: int) -> _Tried | None:
        return self._tried(now, *(each.knob for each in chosen[:count]))

    def _tried(self, now: Looked, *knobs: Knob) -> _Tried | None:
        run = self.run(now, *knobs)
        if run is None:
            return None
        try:
            return _Tried.of(self._look.at(run), self._look)
        except ConfigError:  # of what only the model tells: fewer tensors than processes
            return None


def _between(chosen: Sequence[Turned], too_much: int) -> tuple[int, int]:
    """As many as are enough if savings add up, and all; one alone has been tried."""
    saved = accumulate(each.saves_bytes for each in chosen)
    estimated = next((count for count, size in enumerate(saved, start=1) if size >= too_much), len(chosen))
    return max(2, estimated), len(chosen)


def _fewest(tried: Callable[[int], _Tried | None], low: int, high: int) -> tuple[int, _Tried] | None:
    """Both ends are looked at side by side."""
    ends = shared_out(tried, sorted({low, high}))
    fewest, most = ends[0], ends[-1]
    if fewest is not None and fewest.fits:
        return low, fewest
    if most is None or not most.fits:
        return None
    while high - low > 1:
        half = (low + high) // 2
        fewer = tried(half)
        if fewer is not None and fewer.fits:
            high, most = half, fewer
        else:
            low = half
    return high, most


def that_go_together(words: Sequence[str], knobs: Sequence[Turned], runs: Runs) -> list[Turned]:
    """In their order; of those that set the same, one takes the place of another only if it saves more."""
    wanted: list[Turned] = []
    for each in knobs:
        alike = (other.saves_bytes for other in wanted if other.knob.sets == each.knob.sets)
        if each.saves_bytes > max(alike, default=0):
            wanted.append(each)
    if runs.of(turned(words, [each.knob for each in wanted])) is not None:
        return wanted
    chosen: list[Turned] = []
    for each in wanted:
        if runs.of(turned(words, [other.knob for other in (*chosen, each)])) is not None:
            chosen.append(each)
    return chosen


def _turned(knob: Knob, tried: _Tried | None, now: _Tried) -> Turned | None:
    saved = 0 if tried is None else now.needed_bytes - tried.needed_bytes
    if tried is None or saved <= 0:
        return None
    return Turned(knob, saved, tried.seconds / now.seconds - 1, tried.fits)


def _cost(each: Turned) -> tuple[int, float, int]:
    return each.knob.costs, max(0.0, each.slower_by - _AS_FAST), -each.saves_bytes
