"""Charts of pages: lines over steps, dots over swept values, bars of sample lengths; and their geometry in SVG.

Positions are percentages, so charts fit any width and text keeps its size. Only lines need coordinates, in a stretched
view box of 1000 x 1000.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

from app.tracking.formatting import NO_VALUE, format_number

COLORS = 8
_THINNING_SEGMENTS = 75  # of a long line, with four points per segment
_MAX_LINE_DOTS = 60
_MAX_COLUMNS = 100  # with a tooltip, per chart
_TICKS = 5
_MARGIN = 0.06  # between lines and edge, as a fraction of the range
_MIN_RELATIVE_RANGE = 1e-9  # values in a smaller range count as constant
_MIN_LOG_RATIO = 20.0  # largest to smallest value, for a logarithmic axis
_MIN_SWEPT_LOG_RATIO = 3.0  # the same for swept values
_MAX_SWEPT_TICKS = 6
_MIN_END_DISTANCE = 0.08  # from a tick to the end of a step axis, as a fraction
_MAX_LENGTH_BARS = 12
Point = tuple[float, float | None]  # y is None if the line of the file has no number
Formatter = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Axis:
    """Linear or logarithmic axis from `low` to `high`."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool = False

    def share(self, value: float) -> float:
        """Return the position of a value, from 0 at the start of the axis to 1 at its end."""
        if self.log:
            start = math.log(self.low)
            return (math.log(value) - start) / (math.log(self.high) - start)
        return (value - self.low) / (self.high - self.low)

    def named(self, name: str) -> str:
        return ", ".join(part for part in (name, "log scale" if self.log else "") if part)


@dataclass(frozen=True, slots=True)
class Quantity:
    """Title of a chart, and name, format and scale of its vertical axis; the name must not repeat the title."""

    title: str
    axis: str
    formatter: Formatter = format_number
    may_log: bool = False
    from_zero: bool = False
    is_share: bool = False  # axis from 0 to 1
    tall: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """Line of a chart; the kind `raw` is drawn thin behind its mean, `mean` has no dots."""

    name: str
    points: Sequence[Point]
    color: int = 0
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Dot:
    """Point at percentages of width and height; `text` is the tooltip, if any."""

    x: str
    y: str
    text: str
    color: int
    best: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """Invisible column with a guide line at `x`, in the view box; `text` is the tooltip of both."""

    left: int
    width: int
    x: int
    text: str


@dataclass(frozen=True, slots=True)
class Plot:
    """Geometry of a chart; `lines` have CSS classes and the points of each piece, `legend` names and colors.

    With `columns`, dots have no tooltip of their own.
    """

    quantity: Quantity
    x_name: str
    across: Axis
    up: Axis
    lines: Sequence[tuple[str, list[str]]] = ()
    dots: Sequence[Dot] = ()
    legend: Sequence[tuple[str, int]] = ()
    columns: Sequence[Column] = ()
    remarks: Sequence[str] = ()


class Chart(Protocol):
    """Figure in SVG, and a line of text instead for terminals and Markdown."""

    def plot(self) -> Plot: ...

    def words(self) -> str: ...


@dataclass(frozen=True, slots=True)
class LineChart:
    """Lines over steps; charts with the same lines share a legend outside the charts.

    `steps` extends the horizontal axis to the range of other charts.
    """

    quantity: Quantity
    series: Sequence[Series]
    has_legend: bool = True
    steps: Sequence[float] = ()

    def plot(self) -> Plot:
        drawn = [line for line in self.series if line.points]
        steps = [*self.steps, *(x for line in drawn for x, _ in line.points)]
        across = axis_of(steps, "{:,.0f}".format, steps=True)
        up = _vertical_axis(self.quantity, [y for line in drawn for _, y in line.points if y is not None])
        measured = [line for line in drawn if line.kind != "mean"]
        return Plot(
            self.quantity,
            "step",
            across,
            up,
            lines=[
                (f"c{line.color % COLORS} {line.kind}".strip(), _pieces(thinned(line.points), across, up))
                for line in drawn
            ],
            dots=[dot for line in measured for dot in _line_dots(line, across, up)],
            legend=[(line.name, line.color % COLORS) for line in drawn if line.kind != "raw"]
            if self.has_legend and len(drawn) > 1
            else (),
            columns=list(_columns(drawn, across, self.quantity.formatter)),
            remarks=list(_remarks(measured)),
        )

    def words(self) -> str:
        """Return the first and last values of each line."""
        texts = []
        for line in self.series:
            values = [f"{self.quantity.formatter(y)} at step {x:,.0f}" for x, y in line.points if y is not None]
            texts += [f"{line.name} {', '.join(dict.fromkeys((values[0], values[-1])))}"] if values else []
        return f"{self.quantity.title}: {'; '.join(texts)}"


@dataclass(frozen=True, slots=True)
class DotChart:
    """Dots at x and y with a text; the `best` are marked."""

    quantity: Quantity
    x_name: str
    dots: Sequence[tuple[float, float, str]]
    best: Callable[..., float] = min

    def plot(self) -> Plot:
        values = sorted({x for x, _, _ in self.dots})
        across = axis_of(values, may_log=True, min_log_ratio=_MIN_SWEPT_LOG_RATIO)
        if across.log and len(values) <= _MAX_SWEPT_TICKS:
            across = replace(across, ticks=_labeled(values, format_number))
        up = _vertical_axis(self.quantity, [y for _, y, _ in self.dots])
        marked = self.best(y for _, y, _ in self.dots)
        drawn = [
            Dot(percent(across.share(x)), percent(1 - up.share(y)), text, 2 if y == marked else 0, y == marked)
            for x, y, text in self.dots
        ]
        return Plot(self.quantity, across.named(self.x_name), across, up, dots=drawn)

    def words(self) -> str:
        return f"{self.quantity.title}: {'; '.join(', '.join(text.splitlines()) for _, _, text in self.dots)}"


@dataclass(frozen=True, slots=True)
class Bar:
    """Bar with a length relative to the longest one; `beyond` selects another color."""

    label: str
    share: float
    text: str
    beyond: bool = False


def size_bars(sizes: Iterable[tuple[str, float]], formatter: Formatter, limit: float = math.inf) -> list[Bar]:
    """Return bars relative to the largest one; those above the limit are `beyond` it."""
    named = list(sizes)
    largest = max((size for _, size in named), default=0.0) or 1.0
    return [Bar(name, size / largest, formatter(size), size > limit) for name, size in named]


def length_bars(lengths: Mapping[str, Any], dropped: tuple[str, float] | None = None) -> list[Bar]:
    """Return a histogram of tokens per sample, from the first to the last non-empty bin, with neighbors merged."""
    edges, samples = lengths["edges"], lengths["samples"]
    filled = [at for at, number in enumerate(samples) if number] or [0]
    end = filled[-1] + 1
    joined = -(-(end - filled[0]) // _MAX_LENGTH_BARS)
    classes = [(start, min(start + joined, end)) for start in range(filled[0], end, joined)]
    counts = []
    for first, last in classes:
        shortest, longest = edges[first], edges[last] - 1
        name = f"{shortest:,}" if shortest == longest else f"{shortest:,}-{longest:,}"
        counts.append((name, sum(samples[first:last])))
    most = max(1, dropped[1] if dropped else 0, *(number for _, number in counts))
    bars = [Bar(name, number / most, f"{number:,}") for name, number in counts]
    return [*bars, Bar(dropped[0], dropped[1] / most, f"{dropped[1]:,}", True)] if dropped else bars


def axis_of(
    values: Iterable[float],
    formatter: Formatter = format_number,
    *,
    may_log: bool = False,
    from_zero: bool = False,
    steps: bool = False,
    min_log_ratio: float = _MIN_LOG_RATIO,
) -> Axis:
    """Return an axis for all `values`; logarithmic if allowed and they are positive and far apart.

    A `steps` axis has integer ticks, including both ends, and no margin.
    """
    numbers = list(values)
    low, high = min(numbers, default=0.0), max(numbers, default=1.0)
    if may_log and low > 0 and high / low >= min_log_ratio:
        margin = (high / low) ** _MARGIN
        low, high = low / margin, high * margin
        return Axis(low, high, _labeled(_log_ticks(low, high), formatter), log=True)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= _MIN_RELATIVE_RANGE * max(abs(low), abs(high)):
        half = 1.0 if steps else abs(high) * 0.1 or 0.5
        low, high = low - half, high + half
    elif not steps:
        margin = (high - low) * _MARGIN
        low, high = low - margin * (not from_zero or low < 0), high + margin
    ticks = _linear_ticks(low, high)
    if steps:
        apart = _MIN_END_DISTANCE * (high - low)
        inner = [tick for tick in ticks if tick == round(tick) and low + apart < tick < high - apart]
        ticks = [low, *inner, high]
    return Axis(low, high, _labeled(ticks, formatter))


def _vertical_axis(quantity: Quantity, values: Sequence[float]) -> Axis:
    if quantity.is_share:
        low, high = min(0.0, *values), max(1.0, *values)
        return Axis(low, high, _labeled(_linear_ticks(low, high), quantity.formatter))
    return axis_of(values, quantity.formatter, may_log=quantity.may_log, from_zero=quantity.from_zero)


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return the first, lowest, highest and last point of each segment; segments without numbers become gaps."""
    if len(points) <= 4 * _THINNING_SEGMENTS:
        return list(points)
    edges = [len(points) * at // _THINNING_SEGMENTS for at in range(_THINNING_SEGMENTS + 1)]
    remaining: list[Point] = []
    for start, end in pairwise(edges):
        numbers = [(y, at) for at in range(start, end) if (y := points[at][1]) is not None]
        places = {numbers[0][1], min(numbers)[1], max(numbers)[1], numbers[-1][1]} if numbers else {start}
        remaining += [points[at] for at in sorted(places)]
    return remaining


def percent(share: float) -> str:
    """Return a position as an SVG attribute."""
    return f"{round(100 * share, 2):g}%"


def _pieces(points: Sequence[Point], across: Axis, up: Axis) -> list[str]:
    """Return the points of a line, split at missing numbers."""
    pieces: list[list[str]] = [[]]
    for x, y in points:
        if y is None:
            pieces.append([])
        else:
            pieces[-1].append(f"{1000 * across.share(x):.6g},{1000 - 1000 * up.share(y):.6g}")
    return [" ".join(piece) for piece in pieces if piece]


def _line_dots(series: Series, across: Axis, up: Axis) -> Iterator[Dot]:
    """Yield dots on a line with few points; a single point would draw no line."""
    for x, y in series.points if len(series.points) <= _MAX_LINE_DOTS else ():
        if y is not None:
            yield Dot(percent(across.share(x)), percent(1 - up.share(y)), "", series.color % COLORS)


def _columns(series: Sequence[Series], across: Axis, formatter: Formatter) -> Iterator[Column]:
    """Yield a column around each step, or around some steps of a long line, with the values of all lines there."""
    steps = _hover_steps(series)
    places = [round(1000 * across.share(step)) for step in steps]
    edges = [0, *((left + right) // 2 for left, right in pairwise(places)), 1000]
    for step, x, (left, right) in zip(steps, places, pairwise(edges), strict=True):
        values = [text for line in series if (text := _value_text(line, step, formatter))]
        yield Column(left, right - left, x, "\n".join((f"step {step:,.0f}", *values)))


def _hover_steps(series: Sequence[Series]) -> list[float]:
    """Return all steps, or the step with the most values of each group of steps; the first and the last stay."""
    values = Counter(x for line in series for x, _ in line.points)
    steps = sorted(values)
    if len(steps) <= _MAX_COLUMNS:
        return steps
    edges = [len(steps) * at // _MAX_COLUMNS for at in range(_MAX_COLUMNS + 1)]
    ends = {steps[0], steps[-1]}
    return [max(steps[start:end], key=lambda step: (step in ends, values[step])) for start, end in pairwise(edges)]


def _value_text(series: Series, step: float, formatter: Formatter) -> str:
    """Return the value of a line at a step, or its last one before, with its step; empty outside of the line."""
    at = bisect_right(series.points, step, key=lambda point: point[0]) - 1
    if at < 0 or step > series.points[-1][0]:
        return ""
    x, y = series.points[at]
    value = NO_VALUE if y is None else formatter(y)
    return f"{series.name}: {value}" + (f" (step {x:,.0f})" if x != step else "")


def _remarks(series: Sequence[Series]) -> Iterator[str]:
    """Yield the notes below a chart: thinned lines, missing numbers."""
    longest = max((len(line.points) for line in series), default=0)
    if longest > 4 * _THINNING_SEGMENTS:
        per_segment = f"each {longest / _THINNING_SEGMENTS:,.0f}"
        yield f"{longest:,} lines, drawn by the first, lowest, highest and last of {per_segment}."
    for line in series:
        missing = sum(y is None for _, y in line.points)
        if missing:
            yield f"{missing:,} of {len(line.points):,} lines have no number for {line.name}."


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = last - first
    parts = (1, 2, 5) if decades <= 2 else (1, 3) if decades <= 3 else (1,)
    every = max(1, -(-decades // _TICKS))
    ticks = [part * 10.0**power for power in range(first, last + 1, every) for part in parts]
    return [tick for tick in ticks if low <= tick <= high]


def _linear_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(part * power for part in (1, 2, 2.5, 5, 10) if part * power >= rough * 0.99)
    ticks = [count * step for count in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return [tick for tick in ticks if low <= tick <= high]  # rounding may put a tick just outside


def _labeled(ticks: list[float], formatter: Formatter) -> list[tuple[float, str]]:
    """Return ticks with distinct labels."""
    labels = [formatter(tick) for tick in ticks]
    if len(set(labels)) < len(labels):
        labels = [f"{tick:,.12g}" for tick in ticks]
    return list(zip(ticks, labels, strict=True))
