"""Line charts as SVG. Places are percentages, so that a chart fits any width while its words keep their size.

Only the lines need coordinates: they lie in a picture of 1000 x 1000 that is stretched, their width is not.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from app.page.axis import Axis, Words, axis_of, steps_axis
from app.page.figures import figure
from app.page.html import Child, Html, element, joined
from app.page.thinning import Point, means, thinned

COLOURS = 8
_STRETCHES = 300  # that a long line is thinned to
_HOVERED = 160  # places that tell their numbers
_MEANS = 60
_FEW_MARKS = 100  # of lines that have no number


@dataclass(frozen=True, slots=True)
class Series:
    """One line. `measured` gives every point a dot, as suits a few evaluations; `noisy` draws a mean over many."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    measured: bool = False
    noisy: bool = False

    @property
    def paint(self) -> str:
        """Its class."""
        return f"c{self.colour % COLOURS}"


@dataclass(frozen=True, slots=True)
class Form:
    """How the numbers of a chart are told and spread."""

    words: Words = figure
    may_log: bool = False
    from_zero: bool = False
    wide: bool = False
    legend: bool = True  # where there is more than one line; several charts of the same lines share one


def line_chart(title: str, series: Sequence[Series], form: Form) -> Html | None:
    """Over steps; None where nothing was logged at all."""
    there = [each for each in series if each.points]
    if not there:
        return None
    across = steps_axis(x for each in there for x, _ in each.points)
    up = axis_of(
        (y for each in there for _, y in each.points if y is not None),
        form.words,
        may_log=form.may_log,
        from_zero=form.from_zero,
    )
    inside = (
        frame(across, up),
        *(_drawn(each, across, up) for each in there),
        _gaps(there, across),
        *_hovered(there, across, up, form.words),
    )
    named = there if form.legend and len(there) > 1 else []
    return chart_figure(title, named, plot(title, across, up, *inside), _remarks(there, up), wide=form.wide)


def chart_figure(
    title: str, series: Sequence[Series], drawn: Html, remarks: list[str], *, wide: bool
) -> Html:
    """A chart with its title, a legend of `series`, and what must be known to read it."""
    return element(
        "figure",
        element("figcaption", title, keys(series)),
        drawn,
        element("p", " ".join(remarks), class_="remark") if remarks else None,
        class_="chart wide" if wide else "chart",
    )


def keys(series: Sequence[Series]) -> list[Html]:
    """Names in their colours."""
    return [element("span", element("i"), each.name, class_=f"key {each.paint}") for each in series]


def plot(title: str, across: Axis, up: Axis, *inside: Child) -> Html:
    """The picture. What its edges stand for is told to programs too."""
    picture = element(
        "svg",
        *inside,
        role="img",
        aria_label=title,
        data_x=f"{across.low!r} {across.high!r}",
        data_y=f"{up.low!r} {up.high!r}",
        data_log="" if up.log else None,
    )
    return element("div", picture, class_="plot")


def frame(across: Axis, up: Axis) -> Html:
    """Lines of the grid with their numbers, and the axis below."""
    parts: list[Html] = []
    for value, told in up.ticks:
        y = percent(1 - up.share(value))
        parts.append(element("line", x1="0", x2="100%", y1=y, y2=y, class_="grid"))
        parts.append(element("text", told, x="-8", y=y, dy=".35em", text_anchor="end"))
    parts.append(element("line", x1="0", x2="100%", y1="100%", y2="100%", class_="axis"))
    for value, told in across.ticks:
        x = percent(across.share(value))
        parts.append(element("text", told, x=x, y="100%", dy="1.6em", text_anchor="middle"))
    return joined(parts)


def percent(share: float) -> str:
    """For attributes of SVG."""
    return f"{round(100 * share, 2):g}%"


def _drawn(series: Series, across: Axis, up: Axis) -> Html:
    smooth = series.noisy and len(series.points) >= 2 * _MEANS
    line = _line(thinned(series.points, _STRETCHES), across, up, f"line {'faint ' * smooth}{series.paint}")
    mean = _line(means(series.points, _MEANS), across, up, f"line mean {series.paint}") if smooth else None
    lone = len(series.points) == 1
    dots = [
        element("circle", cx=x, cy=y, r="3", class_=f"dot {series.paint}")
        for x, y in _places(series.points, across, up)
        if lone or (series.measured and len(series.points) <= _HOVERED)
    ]
    return joined(line, mean, dots)


def _line(points: Sequence[Point], across: Axis, up: Axis, paint: str) -> Html:
    """In pieces: where there is no number the line is interrupted."""
    pieces: list[list[str]] = [[]]
    for x, y in points:
        if y is None:
            pieces.append([])
        else:
            pieces[-1].append(f"{1000 * across.share(x):.6g},{1000 - 1000 * up.share(y):.6g}")
    lines = [element("polyline", points=" ".join(piece), class_=paint) for piece in pieces if piece]
    return element(
        "svg", lines, viewBox="0 0 1000 1000", preserveAspectRatio="none", width="100%", height="100%"
    )


def _places(points: Iterable[Point], across: Axis, up: Axis) -> Iterator[tuple[str, str]]:
    for x, y in points:
        if y is not None:
            yield percent(across.share(x)), percent(1 - up.share(y))


def _gaps(series: Sequence[Series], across: Axis) -> Html:
    """A stroke at the upper edge wherever a line has no number."""
    found = [(each.name, x) for each in series for x, y in each.points if y is None]
    marks = []
    for name, step in found[:_FEW_MARKS]:
        x = percent(across.share(step))
        why = element("title", f"step {step:,.0f}: {name} is not a number")
        marks.append(element("line", why, x1=x, x2=x, y1="-2%", y2="3%", class_="gap"))
    return joined(marks)


def _hovered(series: Sequence[Series], across: Axis, up: Axis, words: Words) -> Iterator[Html]:
    """A strip for each of some steps that tells what all lines have there."""
    known: dict[float, list[tuple[Series, float]]] = {}
    for each in series:
        for step, y in thinned(each.points, _HOVERED // 4):
            if y is not None:
                known.setdefault(step, []).append((each, y))
    steps = sorted(known)
    for at, step in enumerate(steps):
        before = across.share((steps[at - 1] + step) / 2) if at else 0.0
        after = across.share((step + steps[at + 1]) / 2) if at + 1 < len(steps) else 1.0
        x = percent(across.share(step))
        told = "".join(f"\n{each.name} {words(y)}" for each, y in known[step])
        yield element(
            "g",
            element("rect", x=percent(before), width=percent(after - before), height="100%"),
            element("line", x1=x, x2=x, y2="100%"),
            [
                element("circle", cx=x, cy=percent(1 - up.share(y)), r="4", class_=each.paint)
                for each, y in known[step]
            ],
            element("title", f"step {step:,.0f}{told}"),
            class_="at",
        )


def _remarks(series: Sequence[Series], up: Axis) -> list[str]:
    """What must be said so that the picture does not deceive."""
    told = ["Logarithmic scale."] if up.log else []
    longest = max(len(each.points) for each in series)
    if any(each.noisy and len(each.points) >= 2 * _MEANS for each in series):
        told.append(f"Bold: the mean of each {longest / _MEANS:,.3g} lines.")
    if longest > 4 * _STRETCHES:
        told.append(
            f"{longest:,} lines, drawn by the first, lowest, highest and last of each {longest / _STRETCHES:,.0f}."
        )
    for each in series:
        missing = sum(y is None for _, y in each.points)
        if missing:
            told.append(
                f"{missing:,} of {len(each.points):,} lines have no number for {each.name} (strokes above)."
            )
    return told
