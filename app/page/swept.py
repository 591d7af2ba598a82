"""Pictures of swept values: each key against the objective, and two keys as a map."""

from collections.abc import Collection, Sequence

from app.page.axis import Axis, axis_of
from app.page.chart import chart_figure, frame, percent, plot
from app.page.document import scrolled
from app.page.figures import NOTHING, figure
from app.page.html import Html, element
from app.page.trials import KeptSweep, KeptTrial, as_numbers

_CROWDED = 12  # values of a key beside each other in a map
_STRONGEST = 40  # per cent of colour under a text that must stay readable
_LONGEST = 14  # characters of a value below an axis
Measured = tuple[KeptTrial, float]


def panels(sweep: KeptSweep) -> Html | None:
    """One for each swept key; None where no trial has an objective."""
    measured = [(trial, trial.objective) for trial in sweep.trials if trial.objective is not None]
    if not measured or not sweep.keys:
        return None
    drawn = [_panel(key, measured) for key in sweep.keys]
    return element("div", [each for each in drawn if each], class_="charts")


def heat_map(sweep: KeptSweep) -> Html | None:
    """Where exactly two keys are swept, and few enough values to stand beside each other."""
    measured = [(trial, trial.objective) for trial in sweep.trials if trial.objective is not None]
    if len(sweep.keys) != 2 or not measured:
        return None
    rows, columns = (_in_order([trial.values.get(key, "") for trial, _ in measured]) for key in sweep.keys)
    if not (2 <= len(rows) <= _CROWDED and 2 <= len(columns) <= _CROWDED):
        return None
    row_key, column_key = sweep.keys
    found: dict[tuple[str, str], float] = {}
    for trial, objective in measured:
        place = (trial.values.get(row_key, ""), trial.values.get(column_key, ""))
        found[place] = min(objective, found.get(place, objective))
    head = element("tr", element("th", f"{row_key} ↓   {column_key} →"), [element("th", c) for c in columns])
    lines = [
        element(
            "tr", element("th", row), [_cell(found.get((row, column)), found.values()) for column in columns]
        )
        for row in rows
    ]
    return element(
        "figure",
        element("figcaption", "Objective of each pair: the stronger the colour, the lower"),
        scrolled(element("table", head, lines, class_="heat")),
    )


def _cell(objective: float | None, others: Collection[float]) -> Html:
    if objective is None:
        return element("td", NOTHING, style="--heat:0")
    low, high = min(others), max(others)
    lowness = (high - objective) / (high - low) if high > low else 1.0
    best = objective == low
    return element(
        "td", figure(objective), style=f"--heat:{lowness * _STRONGEST:.0f}", class_="best" if best else None
    )


def _panel(key: str, measured: Sequence[Measured]) -> Html | None:
    there = [(trial, y) for trial, y in measured if key in trial.values]
    if not there:
        return None
    across, places = _across([trial.values[key] for trial, _ in there])
    up = axis_of([y for _, y in there], may_log=True)
    lowest = min(y for _, y in there)
    dots = [
        element(
            "circle",
            element("title", f"trial {trial.number}: {key}={trial.values[key]}\nobjective {figure(y)}"),
            cx=percent(across.share(x)),
            cy=percent(1 - up.share(y)),
            r="7" if y == lowest else "5.5",
            class_=f"dot pick c{2 if y == lowest else 0}{' best' if y == lowest else ''}",
        )
        for (trial, y), x in sorted(
            zip(there, places, strict=True), key=lambda each: -each[0][1]
        )  # the best one on top
    ]
    remarks = ["Logarithmic objective."] if up.log else []
    title = f"Objective by {key}"
    return chart_figure(title, [], plot(title, across, up, frame(across, up), dots), remarks, wide=False)


def _across(values: Sequence[str]) -> tuple[Axis, list[float]]:
    """Numbers where all are, else each value at a place of its own."""
    numbers = as_numbers(values)
    if numbers is not None and len(set(numbers)) > 1:
        axis = axis_of(numbers, may_log=True)
        if len(set(numbers)) <= 6:  # those themselves rather than round ones near them
            axis = Axis(axis.low, axis.high, tuple((x, figure(x)) for x in sorted(set(numbers))), axis.log)
        return axis, numbers
    names = _in_order(values)
    ticks = tuple((float(at), _cut(name)) for at, name in enumerate(names))
    return Axis(-0.5, len(names) - 0.5, ticks), [float(names.index(value)) for value in values]


def _in_order(values: Sequence[str]) -> list[str]:
    """Each once: numbers by their size, else as they came."""
    once = list(dict.fromkeys(values))
    numbers = as_numbers(once)
    return once if numbers is None else [text for _, text in sorted(zip(numbers, once, strict=True))]


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
