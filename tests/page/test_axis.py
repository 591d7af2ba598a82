"""Axes hold their numbers, and what stands beside them is true and can be told apart."""

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.page.axis import Words, axis_of, steps_axis
from app.page.figures import figure, memory, number, quantity

NUMBERS = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e149, max_value=1e149)


@example([658.0, 1.0275948198428358e-288], True, False, figure)
@example([1e149, 1e-149], True, False, figure)
@example([5e-324], False, True, figure)
@example([1e-9], False, False, figure)
@given(
    st.lists(NUMBERS, max_size=30), st.booleans(), st.booleans(), st.sampled_from([figure, quantity, memory])
)
def test_every_number_has_a_place(values: list[float], may_log: bool, from_zero: bool, words: Words) -> None:
    axis = axis_of(values, words, may_log=may_log, from_zero=from_zero)
    assert axis.low < axis.high
    assert all(-1e-6 <= axis.share(value) <= 1 + 1e-6 for value in values)
    assert all(axis.low <= tick <= axis.high for tick, _ in axis.ticks)
    assert len({told for _, told in axis.ticks}) == len(axis.ticks)
    assert len(axis.ticks) <= 12
    if axis.log:
        assert min(values) > 0
    places = sorted(values)
    assert [axis.share(value) for value in places] == sorted(axis.share(value) for value in places)


@given(st.lists(st.integers(0, 10**9), max_size=30))
def test_steps_are_whole(steps: list[int]) -> None:
    axis = steps_axis(steps)
    assert all(0 <= axis.share(step) <= 1 for step in steps)
    assert all(tick == round(tick) for tick, _ in axis.ticks)
    assert len(axis.ticks) <= 12


@pytest.mark.parametrize(
    ("values", "options", "told"),
    [
        ([0.0, 10.0], {}, ["0", "2.5", "5", "7.5", "10"]),
        ([3.0, 3.0], {}, ["2.8", "3", "3.2"]),
        ([1e-5, 1e-2], {"may_log": True}, ["1e-5", "0.0001", "0.001", "0.01"]),
        ([5.0, 50.0], {"may_log": True}, ["10", "20", "30", "40", "50"]),
        ([0.0, 1e-2], {"may_log": True}, ["0", "0.0025", "0.005", "0.0075", "0.01"]),
        ([90.0, 100.0], {"from_zero": True}, ["0", "25", "50", "75", "100"]),
    ],
)
def test_ticks_are_round(values: list[float], options: dict[str, Any], told: list[str]) -> None:
    assert [text for _, text in axis_of(values, **options).ticks] == told


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (3.62591, "3.6259"),
        (0.0004, "0.0004"),
        (1.23456e-7, "1.235e-7"),
        (79146, "79,146"),
        (0, "0"),
        (1234.56, "1,234.6"),
        (0.012345678, "0.01235"),
        (2e9, "2e9"),
        (-4.5, "-4.5"),
        (10.0, "10"),
    ],
)
def test_figures(value: float, told: str) -> None:
    assert figure(value) == told


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, True, "3", [], 10**400, 1e200])
def test_what_cannot_be_drawn_is_no_number(value: object) -> None:
    assert number(value) is None
