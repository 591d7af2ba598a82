"""Charts: lines go through the numbers of the metrics, and axes contain them."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.pages.charts import DotChart, LineChart, Plot, Point, Quantity, Series, axis_of, length_bars, thinned

NUMBERS = st.just(0.0) | st.floats(1e-30, 1e30) | st.floats(-1e30, -1e-30)


def plot(*series: Series, may_log: bool = False) -> Plot:
    return LineChart(Quantity("A title", "loss", may_log=may_log), series).plot()


def drawn(plot: Plot, paint: str = "c0") -> list[list[tuple[float, float]]]:
    """The lines of a color as numbers, taken back from their places in the picture."""
    pieces = [piece.split() for paints, pieces in plot.lines if paint in paints.split() for piece in pieces]
    return [[_value(plot, *map(float, place.split(","))) for place in piece] for piece in pieces]


def _value(plot: Plot, x: float, y: float) -> tuple[float, float]:
    (left, right), (low, high) = ((axis.low, axis.high) for axis in (plot.across, plot.up))
    share = (1000 - y) / 1000
    value = low * (high / low) ** share if plot.up.log else low + (high - low) * share
    return left + (right - left) * x / 1000, value


@pytest.mark.parametrize("may_log", [False, True])
def test_line_chart_through_points(may_log: bool) -> None:
    points: list[Point] = [(1, 8.5), (2, 4.0), (5, 0.25), (9, 0.3)]
    found = plot(Series("loss", points), may_log=may_log)
    (line,) = drawn(found)
    assert [x for x, _ in line] == pytest.approx([x for x, _ in points], abs=1e-2)
    assert [y for _, y in line] == pytest.approx([y for _, y in points], rel=1e-4)
    assert [column.text for column in found.columns][:2] == ["step 1\nloss: 8.5", "step 2\nloss: 4"]
    assert (found.up.named(found.quantity.axis), found.x_name) == ("loss, log scale" if may_log else "loss", "step")


def test_line_chart_missing_numbers_interrupt_line() -> None:
    found = plot(Series("loss", [(1, 3.0), (2, 2.0), (3, None), (4, 1.0), (5, 0.5)]))
    assert [[round(x) for x, _ in line] for line in drawn(found)] == [[1, 2], [4, 5]]
    assert found.remarks == ["1 of 5 lines have no number for loss."]
    assert drawn(plot(Series("loss", [(1, None), (2, None)]))) == []


def test_line_chart_one_point_is_dot() -> None:
    (dot,) = plot(Series("loss", [(7, 3.0)])).dots
    assert (dot.x, dot.y) == ("50%", "50%")


def test_line_chart_several_lines_legend() -> None:
    lines = (Series("a", [(1, 1.0), (2, 2.0)], 0), Series("b", [(2, 3.0), (3, 4.0)], 1), Series("c", []))
    assert drawn(plot(*lines), "c1") == [[pytest.approx((2, 3.0), abs=1e-2), pytest.approx((3, 4.0), abs=1e-2)]]
    assert plot(*lines).legend == [("a", 0), ("b", 1)]


def test_line_chart_columns_name_all_lines_of_a_step() -> None:
    train = Series("train", [(1, 4.0), (2, None), (3, 3.0), (4, 2.0)])
    columns = plot(train, Series("eval", [(0, 5.0), (3, 2.5)], 1)).columns
    assert [column.text for column in columns] == [
        "step 0\neval: 5",
        "step 1\ntrain: 4\neval: 5 (step 0)",
        "step 2\ntrain: -\neval: 5 (step 0)",
        "step 3\ntrain: 3\neval: 2.5",
        "step 4\ntrain: 2",
    ]
    assert [column.x for column in columns] == [0, 250, 500, 750, 1000]


@given(st.lists(st.integers(1, 900), min_size=1, max_size=600), st.integers(1, 50))
def test_line_chart_columns_cover_the_chart(gaps: list[int], every: int) -> None:
    steps = [float(sum(gaps[: at + 1])) for at in range(len(gaps))]
    points = [(step, 1.0) for step in steps]
    columns = plot(Series("train", points), Series("eval", points[::every], 1)).columns
    assert len(columns) == min(len(steps), 100)
    assert [column.left for column in columns] == [0, *(column.left + column.width for column in columns)][:-1]
    assert columns[-1].left + columns[-1].width == 1000
    assert all(column.left <= column.x <= column.left + column.width for column in columns)
    assert (columns[0].text.splitlines()[0], columns[-1].text.splitlines()[0]) == (
        f"step {steps[0]:,.0f}",
        f"step {steps[-1]:,.0f}",
    )


def test_line_chart_on_the_steps_of_other_charts() -> None:
    chart = LineChart(Quantity("A title", ""), [Series("lr", [(5, 1.0), (9, 2.0)])], steps=(0, 10))
    assert (chart.plot().across.low, chart.plot().across.high) == (0, 10)


@pytest.mark.parametrize("values", [(0.0, 0.94), (0.5, 0.5), (1.0, 1.0)])
def test_line_chart_of_a_share_ends_at_all(values: tuple[float, float]) -> None:
    quantity = Quantity("Exact match", "", formatter="{:.0%}".format, is_share=True)
    up = LineChart(quantity, [Series("exact match", list(enumerate(values)))]).plot().up
    assert [text for _, text in up.ticks] == ["0%", "20%", "40%", "60%", "80%", "100%"]
    assert (up.low, up.high) == (0, 1)


def test_chart_words_have_ends_of_lines_and_each_dot() -> None:
    lines = [Series("a", [(1, 4.0), (2, None), (3, 2.5)]), Series("b", [(2, 3.0)]), Series("c", [(2, None)])]
    assert LineChart(Quantity("Loss", ""), lines).words() == "Loss: a 4 at step 1, 2.5 at step 3; b 3 at step 2"
    assert DotChart(Quantity("Best", ""), "lr", [(1, 2, "a\nb"), (2, 1, "c")]).words() == "Best: a, b; c"


def test_line_chart_thinning_keeps_extremes() -> None:
    dice = random.Random(1)
    points: list[Point] = [(float(x), dice.random()) for x in range(50_000)]
    points[31_234], points[17_005] = (31_234.0, 99.0), (17_005.0, -99.0)
    kept = thinned(points)
    assert len(kept) <= 300
    assert kept == sorted(kept)
    assert {points[0], points[-1], points[31_234], points[17_005]} <= set(kept) <= set(points)
    (remark,) = plot(Series("loss", points)).remarks
    assert "50,000 lines, drawn by the first, lowest, highest and last" in remark
    assert len(thinned([(float(x), None) for x in range(900)])) == 75, "gaps stay"


@given(st.lists(NUMBERS, max_size=30), st.booleans(), st.booleans())
def test_axis_contains_every_number(values: list[float], may_log: bool, from_zero: bool) -> None:
    axis = axis_of(values, may_log=may_log, from_zero=from_zero)
    assert axis.low < axis.high
    assert all(-1e-6 <= axis.share(value) <= 1 + 1e-6 for value in values)
    assert all(axis.low <= tick <= axis.high for tick, _ in axis.ticks)
    assert len({text for _, text in axis.ticks}) == len(axis.ticks) <= 16


@pytest.mark.parametrize(
    ("values", "options", "told"),
    [
        ([0.0, 10.0], {}, ["0", "2.5", "5", "7.5", "10"]),
        ([3.0, 3.0], {}, ["2.8", "3", "3.2"]),
        ([1e-5, 1e-2], {"may_log": True}, ["1e-5", "0.0001", "0.001", "0.01"]),
        ([5.0, 50.0], {"may_log": True}, ["10", "20", "30", "40", "50"]),
        ([90.0, 100.0], {"from_zero": True}, ["0", "25", "50", "75", "100"]),
        ([1, 3], {"steps": True}, ["1", "2", "3"]),
        ([0, 397], {"steps": True}, ["0", "100", "200", "300", "397"]),
        ([1, 403], {"steps": True}, ["1", "100", "200", "300", "403"]),
    ],
)
def test_axis_round_ticks(values: list[float], options: dict[str, Any], told: list[str]) -> None:
    assert [text for _, text in axis_of(values, **options).ticks] == told


def test_length_bars_join_classes() -> None:
    bars = length_bars({"edges": list(range(1, 26)), "samples": [1] * 24}, (">24", 4))
    assert [(bar.label, bar.text) for bar in (bars[0], bars[-1])] == [("1-2", "2"), (">24", "4")]
    assert (len(bars), bars[0].share, bars[-1].beyond) == (13, 0.5, True)
    sparse = length_bars({"edges": [1, 9, 17, 25, 26, 41], "samples": [0, 3, 0, 1, 0]})
    assert [(bar.label, bar.text) for bar in sparse] == [("9-16", "3"), ("17-24", "0"), ("25", "1")]
