"""The plan loses nothing, never overflows, and is that of placing row by row."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.data.packing import plan_bins


def contents(lengths: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """The rows of each bin."""
    order, starts = plan_bins(lengths, capacity)
    return [part.tolist() for part in np.split(order, starts[1:])] if len(starts) else []


def placed_one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Best-fit-decreasing as it is told: each row into the fullest bin that takes it; the room left of each bin."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda i: rooms[i])] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


ROWS = st.integers(1, 60).flatmap(
    lambda capacity: st.tuples(st.just(capacity), st.lists(st.integers(1, capacity), max_size=120))
)


@given(ROWS)
def test_every_row_once_none_too_many_and_as_good_as_one_by_one(case: tuple[int, list[int]]) -> None:
    capacity, rows = case
    lengths = np.array(rows, np.int64)
    bins = contents(lengths, capacity)
    assert sorted(row for members in bins for row in members) == list(range(len(rows)))
    rooms = [capacity - int(lengths[members].sum()) for members in bins]
    assert all(0 <= room < capacity for room in rooms)
    assert sorted(rooms) == placed_one_by_one(rows, capacity)


@given(ROWS)
def test_the_plan_is_the_same_each_time(case: tuple[int, list[int]]) -> None:
    capacity, rows = case
    first, second = (plan_bins(np.array(rows, np.int32), capacity) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_rows_make_no_bins() -> None:
    order, starts = plan_bins(np.empty(0, np.int64), 8)
    assert len(order) == len(starts) == 0


@pytest.mark.parametrize("lengths", [[0, 3], [3, 9]])
def test_a_row_that_no_bin_can_hold_is_our_fault(lengths: list[int]) -> None:
    with pytest.raises(AssertionError):
        plan_bins(np.array(lengths), 8)


def test_a_million_chat_like_rows_are_planned_at_once_and_fill_their_bins() -> None:
    """Lognormal, median 490 tokens, clipped at the capacity: the shape of chat data."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(490), 0.8, 1_000_000), 1, 2048).astype(np.int32)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        _, starts = plan_bins(lengths, 2048)
        seconds.append(time.perf_counter() - started)
    assert lengths.sum() / (len(starts) * 2048) >= 0.999
    assert min(seconds) <= 0.5
