"""From numbers to places: where an axis begins and ends, and which numbers stand beside it."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from app.page.figures import figure

_TICKS = 5
_MARGIN = 0.06  # of the range, so that no line runs along the edge
_FLAT = 1e-9  # a range smaller than this part of its numbers is none
_LOG_FROM = 20.0  # times the smallest, before distances on a linear axis hide what is small
_SMALLEST = 1e-150  # what is closer to zero is drawn as zero: quotients of it would be no numbers
Words = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Axis:
    """`low` and `high` are numbers; `ticks` lie between them."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def share(self, value: float) -> float:
        """0 at the beginning of the axis, 1 at its end."""
        if self.log:
            begin = math.log(self.low)
            return (math.log(value) - begin) / (math.log(self.high) - begin)
        return (value - self.low) / (self.high - self.low)


def axis_of(
    values: Iterable[float], words: Words = figure, *, may_log: bool = False, from_zero: bool = False
) -> Axis:
    """Holds all `values`; logarithmic only where it may be, all are positive and they lie far apart."""
    known = list(values)
    low, high = min(known, default=0.0), max(known, default=1.0)
    if may_log and low > _SMALLEST and high / low >= _LOG_FROM:
        return _log_axis(low, high, words)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    size = max(abs(low), abs(high))
    if high - low <= max(_FLAT * size, _SMALLEST):
        half = size * 0.1 if size > _SMALLEST else 0.5
        low, high = low - half, high + half
    else:
        margin = (high - low) * _MARGIN
        low, high = low - margin * (not from_zero or low < 0), high + margin
    return Axis(low, high, _told(_linear_ticks(low, high), words))


def steps_axis(steps: Iterable[float]) -> Axis:
    """Of whole numbers, from the first to the last; both ends are used."""
    known = list(steps)
    low, high = min(known, default=0.0), max(known, default=1.0)
    if low == high:
        low, high = low - 1, high + 1
    ticks = [tick for tick in _linear_ticks(low, high) if tick == round(tick)]
    return Axis(low, high, tuple((tick, f"{tick:,.0f}") for tick in ticks))


def _log_axis(low: float, high: float, words: Words) -> Axis:
    margin = (high / low) ** _MARGIN
    low, high = low / margin, high * margin
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = last - first
    if decades > _TICKS:
        every = -(-decades // _TICKS)
        ticks = [10.0**power for power in range(first, last + 1, every)]
    else:
        parts = (1, 2, 5) if decades <= 2 else (1, 3) if decades <= 3 else (1,)
        ticks = [part * 10.0**power for power in range(first, last + 1) for part in parts]
    return Axis(low, high, _told([tick for tick in ticks if low <= tick <= high], words), log=True)


def _linear_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(part * power for part in (1, 2, 2.5, 5, 10) if part * power >= rough * 0.99)
    ticks = [count * step for count in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return [tick for tick in ticks if low <= tick <= high]  # rounding may put one just outside


def _told(ticks: list[float], words: Words) -> tuple[tuple[float, str], ...]:
    """Two ticks must not read alike."""
    told = [words(tick) for tick in ticks]
    if len(set(told)) < len(told):
        told = [f"{tick:,.12g}" for tick in ticks]
    return tuple(zip(ticks, told, strict=True))
