"""The knobs that bring a run into less memory, each planned again, so that what it saves is no guess."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from app.errors import ConfigError
from app.plan.forked import shared_out
from app.plan.knobs import LEARNING, Knob, candidates, seconds_per_token, turned, words_of
from app.plan.look import Look, Looked

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

    def __init__(self, look: Look) -> None:
        self._look = look

    def knobs(self, now: Looked) -> list[Turned]:
        """Those that save memory, the cheapest first."""
        knobs = candidates(now.run, self._look.processes)
        others = [each for each in knobs if each.makes_another_network]  # one process loads what these need
        alone = [[each] for each in reversed(knobs) if each not in others]  # the longest first
        found_by_all = shared_out(partial(self._each_tried, self.words(now)), [others, *alone])
        tried = {knob: found for part in found_by_all for knob, found in part.items()}
        found = (_turned(each, tried[each], _Tried.of(now, self._look)) for each in knobs)
        return sorted((each for each in found if each is not None), key=_cost)

    def together(self, now: Looked, knobs: Sequence[Turned]) -> dict[str, Any] | None:
        """As few as fit, the cheapest first; each of them saves memory, so halving finds them.

        Where one is enough alone, only of those that cost less; what saves next to nothing comes last.
        """
        words, little = self.words(now), _LITTLE * (now.verdict.needed_bytes - now.verdict.memory_bytes)
        enough = min((each.knob.costs for each in knobs if each.fits), default=LEARNING + 1)
        knobs = [each for each in knobs if each.knob.costs < enough]
        knobs.sort(key=lambda each: each.saves_bytes < little)
        chosen = that_go_together(words, knobs) if len(knobs) > 1 else []
        alone, count = 1, len(chosen)
        tried = self._tried(words, *chosen) if count > alone else None
        while count - alone > 1 and tried is not None and tried.fits:
            half = (alone + count) // 2
            fewer = self._tried(words, *chosen[:half])
            if fewer is not None and fewer.fits:
                tried, count = fewer, half
            else:
                alone = half
        if tried is None or not tried.fits:
            return None
        return {"override": " ".join(words_of(chosen[:count])), "needed_bytes": tried.needed_bytes}

    def words(self, now: Looked) -> list[str]:
        """What was typed; bins that were found stay as they are while knobs are turned."""
        open_keys = ("batching.tokens=", "batching.accumulation=") if now.chosen_bins else ()
        typed = [word for word in self._look.overrides if not word.lstrip("+").startswith(open_keys)]
        return [*typed, *now.bins] if now.chosen_bins else typed

    def _each_tried(self, words: Sequence[str], knobs: Sequence[Knob]) -> dict[Knob, _Tried | None]:
        return {knob: self._tried(words, knob) for knob in knobs}

    def _tried(self, words: Sequence[str], *knobs: Knob) -> _Tried | None:
        """None where they do not go with what was typed."""
        run = turned(words, knobs)
        if run is None:
            return None
        try:
            return _Tried.of(self._look.at(run), self._look)
        except ConfigError:  # of what only the model tells: fewer tensors than processes
            return None


def that_go_together(words: Sequence[str], knobs: Sequence[Turned]) -> list[Knob]:
    """In their order; of those that set the same, one takes the place of another only if it saves more."""
    wanted: list[Turned] = []
    for each in knobs:
        alike = (other.saves_bytes for other in wanted if other.knob.sets == each.knob.sets)
        if each.saves_bytes > max(alike, default=0):
            wanted.append(each)
    chosen = [each.knob for each in wanted]
    if turned(words, chosen) is not None:
        return chosen
    chosen = []
    for each in wanted:
        chosen += [each.knob] if turned(words, [*chosen, each.knob]) is not None else []
    return chosen


def _turned(knob: Knob, tried: _Tried | None, now: _Tried) -> Turned | None:
    saved = 0 if tried is None else now.needed_bytes - tried.needed_bytes
    if tried is None or saved <= 0:
        return None
    return Turned(knob, saved, tried.seconds / now.seconds - 1, tried.fits)


def _cost(each: Turned) -> tuple[int, float, int]:
    return each.knob.costs, max(0.0, each.slower_by - _AS_FAST), -each.saves_bytes
