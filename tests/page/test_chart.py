"""The numbers of a picture are those of the metrics."""

import math
import random

import pytest

from app.page.chart import Form, Series, line_chart
from app.page.thinning import Point, means, thinned
from tests.page.reading import Element, drawn, read


def made(*series: Series, form: Form | None = None) -> Element:
    chart = line_chart("A title", series, form or Form())
    assert chart is not None
    return read(chart).one("figure")


def same(points: list[Point], found: list[tuple[float, float]]) -> bool:
    return [x for x, _ in found] == pytest.approx([x for x, _ in points], abs=1e-2) and [
        y for _, y in found
    ] == pytest.approx([y for _, y in points], rel=1e-4)


@pytest.mark.parametrize("may_log", [False, True])
def test_a_line_goes_through_its_points(may_log: bool) -> None:
    points: list[Point] = [(1, 8.5), (2, 4.0), (5, 0.25), (9, 0.3)]
    figure = made(Series("loss", points), form=Form(may_log=may_log))
    (line,) = drawn(figure)
    assert same(points, line)
    assert ("data-log" in figure.all("svg")[0].attributes) == may_log
    told = [each.text for each in figure.all("title")]
    assert told == ["step 1\nloss 8.5", "step 2\nloss 4", "step 5\nloss 0.25", "step 9\nloss 0.3"]


def test_where_there_is_no_number_the_line_is_interrupted_and_that_is_said() -> None:
    figure = made(Series("loss", [(1, 3.0), (2, 2.0), (3, None), (4, 1.0), (5, 0.5)]))
    assert [[round(x) for x, _ in line] for line in drawn(figure)] == [[1, 2], [4, 5]]
    assert "1 of 5 lines have no number for loss" in figure.text
    (mark,) = figure.all("line", "gap")
    assert mark.one("title").text == "step 3: loss is not a number"


def test_one_point_is_a_dot() -> None:
    figure = made(Series("loss", [(7, 3.0)]))
    (dot,) = figure.all("circle", "dot")
    assert (dot.attributes["cx"], dot.attributes["cy"]) == ("50%", "50%")
    assert "step 7\nloss 3" in figure.text


def test_nothing_logged_is_no_chart_and_nothing_finite_is_an_empty_one() -> None:
    assert line_chart("A title", [Series("loss", [])], Form()) is None
    figure = made(Series("loss", [(1, None), (2, None)]))
    assert drawn(figure) == []
    assert "2 of 2 lines have no number" in figure.text


def test_several_lines_have_their_colours_and_a_legend() -> None:
    figure = made(Series("a", [(1, 1.0), (2, 2.0)], 0), Series("b", [(2, 3.0), (3, 4.0)], 1, measured=True))
    assert same([(2, 3.0), (3, 4.0)], drawn(figure, "c1")[0])
    assert [key.text for key in figure.all("span", "key")] == ["a", "b"]
    assert [each.text for each in figure.all("title")] == ["step 1\na 1", "step 2\na 2\nb 3", "step 3\nb 4"]
    assert len(figure.all("circle", "dot")) == 2


def test_many_points_keep_their_extremes() -> None:
    dice = random.Random(1)
    points: list[Point] = [(float(x), dice.random()) for x in range(50_000)]
    points[31_234], points[17_005] = (31_234.0, 99.0), (17_005.0, -99.0)
    kept = thinned(points, 300)
    assert len(kept) <= 1200
    assert set(kept) <= set(points)
    assert kept == sorted(kept)
    assert {points[0], points[-1], points[31_234], points[17_005]} <= set(kept)
    figure = made(Series("loss", points, noisy=True))
    (line,) = drawn(figure, class_="faint")
    assert max(y for _, y in line) == pytest.approx(99.0)
    assert min(y for _, y in line) == pytest.approx(-99.0)
    assert "50,000 lines, drawn by the first, lowest, highest and last of each 167." in figure.text
    (mean,) = drawn(figure, class_="mean")
    assert [y for _, y in mean] == pytest.approx([y for _, y in means(points, 60)], abs=1e-3)
    assert "Bold: the mean of each 833 lines." in figure.text


def test_a_mean_is_of_what_is_known() -> None:
    assert means([(1, 2.0), (2, None), (3, 4.0), (4, None)], 2) == [(1.5, 2.0), (3.5, 4.0)]
    assert means([(1, None), (2, 3.0)], 2) == [(1, None), (2, 3.0)]
    assert thinned([(float(x), None) for x in range(9)], 2) == [(0.0, None), (4.0, None)]


def test_far_apart_numbers_stay_in_the_picture() -> None:
    figure = made(Series("loss", [(1, 1e140), (2, -1e140), (3, 1e-140)]))
    for line in figure.all("polyline"):
        assert all(
            math.isfinite(float(part)) and -1 <= float(part) <= 1001
            for pair in str(line.attributes["points"]).split()
            for part in pair.split(",")
        )
