"""Charts as numbers and places, which a template draws as SVG: lines over steps, dots over values, bars.

Places are percentages, so that a chart fits any width while its words keep their size. Only the lines need
coordinates: they lie in a picture of 1000 x 1000 that is stretched.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from app.pages.read_run import SavedRun
from app.tracking.formatting import finite_number, format_bytes, format_count, format_number

COLOURS = 8
_STRETCHES = 75  # of a long line, four points of each
_MAX_LINE_DOTS = 60
_TICKS = 5
_MARGIN = 0.06  # of the range, so that no line runs along the edge
_MIN_RANGE = 1e-9  # of the numbers; a smaller range is none
_MIN_LOG_RATIO = 20.0  # of the largest to the smallest, before a linear axis hides what is small
_TINY = 1e-150  # what is closer to zero is drawn as zero: quotients of it would be no numbers
_MAX_LABEL = 14  # characters of a value below an axis
_MAX_LENGTH_BARS = 12
Point = tuple[float, float | None]  # None: the line of the file has no number
Words = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Axis:
    """`low` and `high` are numbers; `ticks` lie between them."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool = False

    def share(self, value: float) -> float:
        """0 at the beginning of the axis, 1 at its end."""
        if self.log:
            start = math.log(self.low)
            return (math.log(value) - start) / (math.log(self.high) - start)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, slots=True)
class Quantity:
    """What a chart shows: its title, the name of its upright axis, and how its numbers are told and spread."""

    title: str
    unit: str
    words: Words = format_number
    may_log: bool = False
    from_zero: bool = False
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart."""

    name: str
    points: Sequence[Point]
    colour: int = 0


@dataclass(frozen=True, slots=True)
class Dot:
    """At percentages of width and height; `text` is told when it is pointed at."""

    x: str
    y: str
    text: str
    colour: int
    best: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """`lines` are colours with the points of each piece; `legend` has names and colours."""

    quantity: Quantity
    x_name: str
    across: Axis
    up: Axis
    lines: Sequence[tuple[int, list[str]]] = ()
    dots: Sequence[Dot] = ()
    legend: Sequence[tuple[str, int]] = ()
    remarks: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Bar:
    """`share` of the longest possible bar; `beyond` is drawn in another colour."""

    label: str
    share: float
    text: str
    beyond: bool = False


def line_chart(quantity: Quantity, series: Sequence[Series], *, legend: bool = True) -> Chart | None:
    """Over steps; None where nothing was logged at all. Several charts of the same lines share one legend."""
    shown = [each for each in series if each.points]
    if not shown:
        return None
    across = axis_of((x for each in shown for x, _ in each.points), lambda x: f"{x:,.0f}", steps=True)
    known = [y for each in shown for _, y in each.points if y is not None]
    up = axis_of(known, quantity.words, may_log=quantity.may_log, from_zero=quantity.from_zero)
    return Chart(
        quantity,
        "step",
        across,
        up,
        lines=[(each.colour % COLOURS, _pieces(thinned(each.points), across, up)) for each in shown],
        dots=[dot for each in shown for dot in _line_dots(each, across, up, quantity.words)],
        legend=[(each.name, each.colour % COLOURS) for each in shown] if legend and len(shown) > 1 else (),
        remarks=list(_remarks(shown, up)),
    )


_LOSS = Quantity("Loss", "mean of a trained token", may_log=True, wide=True)
_OTHERS = {
    "lr": Quantity("Learning rate", "lr", from_zero=True),
    "grad_norm": Quantity("Gradient norm", "before clipping", may_log=True),
    "tokens_per_second": Quantity("Tokens a second", "tokens/s", words=format_count, from_zero=True),
    "peak_memory_bytes": Quantity("Peak memory", "measured", words=format_bytes, from_zero=True),
}


def curves(run: SavedRun) -> list[Chart]:
    """Of one run; none where nothing was logged."""
    losses = [Series("train", run.points("loss")), Series("held out", run.points("eval_loss"), 1)]
    others = (line_chart(kind, [Series(key, run.points(key))]) for key, kind in _OTHERS.items())
    return _drawn([line_chart(_LOSS, losses), *others])


def curves_of_several(runs: Sequence[tuple[str, SavedRun]]) -> list[Chart]:
    """Each run in a colour of its own, by the name that is given with it."""
    losses = {
        "eval_loss": replace(_LOSS, title="Loss on held-out rows"),
        "loss": replace(_LOSS, title="Training loss"),
    }
    return _drawn(
        line_chart(
            kind, [Series(name, run.points(key), at) for at, (name, run) in enumerate(runs)], legend=False
        )
        for key, kind in {**losses, **_OTHERS}.items()
    )


def _drawn(charts: Iterable[Chart | None]) -> list[Chart]:
    return [chart for chart in charts if chart is not None]


def scatter_chart(quantity: Quantity, x_name: str, found: Sequence[tuple[str, float, str]]) -> Chart:
    """A dot for each value as it was typed, its number and what to tell of it; the lowest are marked."""
    across, places = _values_axis([value for value, _, _ in found])
    up = axis_of([y for _, y, _ in found], quantity.words, may_log=quantity.may_log)
    lowest = min(y for _, y, _ in found)
    dots = [
        Dot(percent(across.share(x)), percent(1 - up.share(y)), text, 2 if y == lowest else 0, y == lowest)
        for (_, y, text), x in zip(found, places, strict=True)
    ]
    dots.sort(key=lambda dot: dot.best)  # the best one is drawn on top
    return Chart(quantity, x_name, across, up, dots=dots, remarks=["Logarithmic scale."] if up.log else ())


def length_bars(lengths: Mapping[str, Any], dropped: tuple[str, float] | None = None) -> list[Bar]:
    """How many samples have how many tokens, neighbouring classes put together; nothing where `lengths` is odd."""
    edges, counts = (
        [finite_number(each) for each in given] if isinstance(given, list) else []
        for given in (lengths.get("edges"), lengths.get("samples"))
    )
    bounds, samples = ([each for each in given if each is not None] for given in (edges, counts))
    is_whole = len(bounds) == len(edges) == len(counts) + 1 == len(samples) + 1
    if not samples or not is_whole or any(low >= high for low, high in pairwise(bounds)):
        return []
    joined = -(-len(samples) // _MAX_LENGTH_BARS)
    starts = range(0, len(samples), joined)
    classes = pairwise([*(bounds[start] for start in starts), bounds[-1]])
    found = [
        (f"{low:,.0f}-{high - 1:,.0f}" if high - 1 > low else f"{low:,.0f}", sum(samples[at : at + joined]))
        for (low, high), at in zip(classes, starts, strict=True)
    ]
    most = max([count for _, count in found] + [dropped[1] if dropped else 0.0, 1.0])
    bars = [Bar(name, count / most, f"{count:,.0f}") for name, count in found]
    return [*bars, Bar(dropped[0], dropped[1] / most, f"{dropped[1]:,.0f}", True)] if dropped else bars


def axis_of(
    values: Iterable[float],
    words: Words = format_number,
    *,
    may_log: bool = False,
    from_zero: bool = False,
    steps: bool = False,
) -> Axis:
    """Holds all `values`; logarithmic only where it may be, all are positive and they lie far apart.

    `steps` are whole numbers, and both ends are used.
    """
    known = list(values)
    low, high = min(known, default=0.0), max(known, default=1.0)
    if may_log and low > _TINY and high / low >= _MIN_LOG_RATIO:
        margin = (high / low) ** _MARGIN
        low, high = low / margin, high * margin
        return Axis(low, high, _told(_log_ticks(low, high), words), log=True)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    size = max(abs(low), abs(high))
    if high - low <= max(_MIN_RANGE * size, _TINY):
        half = 1.0 if steps else size * 0.1 if size > _TINY else 0.5
        low, high = low - half, high + half
    elif not steps:
        margin = (high - low) * _MARGIN
        low, high = low - margin * (not from_zero or low < 0), high + margin
    ticks = _linear_ticks(low, high)
    return Axis(low, high, _told([tick for tick in ticks if not steps or tick == round(tick)], words))


def thinned(points: Sequence[Point]) -> list[Point]:
    """First, lowest, highest and last point of each stretch; a stretch without any number is a gap."""
    if len(points) <= 4 * _STRETCHES:
        return list(points)
    edges = [len(points) * at // _STRETCHES for at in range(_STRETCHES + 1)]
    kept: list[Point] = []
    for start, end in pairwise(edges):
        known = [(y, at) for at in range(start, end) if (y := points[at][1]) is not None]
        places = {known[0][1], min(known)[1], max(known)[1], known[-1][1]} if known else {start}
        kept += [points[at] for at in sorted(places)]
    return kept


def percent(share: float) -> str:
    """For attributes of SVG."""
    return f"{round(100 * share, 2):g}%"


def as_numbers(texts: Sequence[str]) -> list[float] | None:
    """All of them, if all are numbers."""
    try:
        found = [finite_number(float(text)) for text in texts]
    except ValueError:
        return None
    known = [each for each in found if each is not None]
    return known if len(known) == len(texts) and known else None


def _pieces(points: Sequence[Point], across: Axis, up: Axis) -> list[str]:
    """A line is interrupted where there is no number."""
    pieces: list[list[str]] = [[]]
    for x, y in points:
        if y is None:
            pieces.append([])
        else:
            pieces[-1].append(f"{1000 * across.share(x):.6g},{1000 - 1000 * up.share(y):.6g}")
    return [" ".join(piece) for piece in pieces if piece]


def _line_dots(series: Series, across: Axis, up: Axis, words: Words) -> Iterator[Dot]:
    """Of lines of few points: a lone point would be no line at all."""
    for x, y in series.points if len(series.points) <= _MAX_LINE_DOTS else ():
        if y is not None:
            text = f"step {x:,.0f}: {series.name} {words(y)}"
            yield Dot(percent(across.share(x)), percent(1 - up.share(y)), text, series.colour % COLOURS)


def _remarks(series: Sequence[Series], up: Axis) -> Iterator[str]:
    """What must be said so that the picture does not deceive."""
    if up.log:
        yield "Logarithmic scale."
    longest = max(len(each.points) for each in series)
    if longest > 4 * _STRETCHES:
        each_of = f"each {longest / _STRETCHES:,.0f}"
        yield f"{longest:,} lines, drawn by the first, lowest, highest and last of {each_of}."
    for each in series:
        missing = sum(y is None for _, y in each.points)
        if missing:
            yield f"{missing:,} of {len(each.points):,} lines have no number for {each.name}."


def _values_axis(values: Sequence[str]) -> tuple[Axis, list[float]]:
    """Numbers where all are, else each value at a place of its own."""
    numbers = as_numbers(values)
    if numbers is not None and len(set(numbers)) > 1:
        axis = axis_of(numbers, may_log=True)
        if len(set(numbers)) <= 6:  # those themselves rather than round ones near them
            axis = Axis(axis.low, axis.high, [(x, format_number(x)) for x in sorted(set(numbers))], axis.log)
        return axis, numbers
    names = list(dict.fromkeys(values))
    labels = [name if len(name) <= _MAX_LABEL else f"{name[: _MAX_LABEL - 1]}…" for name in names]
    axis = Axis(-0.5, len(names) - 0.5, [(float(at), label) for at, label in enumerate(labels)])
    return axis, [float(names.index(value)) for value in values]


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
    return [tick for tick in ticks if low <= tick <= high]  # rounding may put one just outside


def _told(ticks: list[float], words: Words) -> list[tuple[float, str]]:
    """Two ticks must not read alike."""
    told = [words(tick) for tick in ticks]
    if len(set(told)) < len(told):
        told = [f"{tick:,.12g}" for tick in ticks]
    return list(zip(ticks, told, strict=True))
