"""The plan loses nothing, never overflows, is that of placing row by row, and no plan is better than the bound."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.data.packing import least_bins, plan_bins


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


def fewest_bins(lengths: list[int], capacity: int) -> int:
    """Exactly, by trying: the longest row that is left goes into each bin that takes it, or into a new one."""
    rows = sorted(lengths, reverse=True)
    best = len(rows)

    def place(at: int, rooms: list[int]) -> None:
        nonlocal best
        if len(rooms) >= best or len(rooms) - sum(rooms) // capacity > best:
            return
        if at == len(rows):
            best = len(rooms)
            return
        length = rows[at]
        for room in {room for room in rooms if room >= length}:  # bins with equal room are the same
            left = rooms.copy()
            left.remove(room)
            place(at + 1, [*left, room - length])
        place(at + 1, [*rooms, capacity - length])

    place(0, [])
    return best


def bound_by_rows(lengths: list[int], capacity: int) -> int:
    """Martello and Toth's L2 as it is written down, row by row; `small` = 0 is all tokens over the capacity."""
    bounds = [0]
    for small in range(capacity // 2 + 1):
        alone = [n for n in lengths if n > capacity - small]
        shared = [n for n in lengths if capacity // 2 < n <= capacity - small]
        others = [n for n in lengths if small <= n <= capacity // 2]
        beyond = sum(others) - (len(shared) * capacity - sum(shared))
        bounds.append(len(alone) + len(shared) + max(0, -(-beyond // capacity)))
    return max(bounds)


FEW_ROWS = st.integers(1, 40).flatmap(
    lambda capacity: st.tuples(st.just(capacity), st.lists(st.integers(1, capacity), max_size=10))
)


@given(FEW_ROWS)
def test_the_plan_lies_between_what_is_possible_and_what_is_proven(case: tuple[int, list[int]]) -> None:
    capacity, rows = case
    lengths = np.array(rows, np.int32)
    bound, fewest, planned = (
        least_bins(lengths, capacity),
        fewest_bins(rows, capacity),
        len(plan_bins(lengths, capacity)[1]),
    )
    assert -(-sum(rows) // capacity) <= bound <= fewest <= planned
    assert 9 * planned <= 11 * fewest + 6, "the guarantee of best fit decreasing"


@given(ROWS)
def test_the_bound_over_lengths_is_that_over_rows(case: tuple[int, list[int]]) -> None:
    capacity, rows = case
    assert least_bins(np.array(rows, np.int64), capacity) == bound_by_rows(rows, capacity)


def test_the_bound_knows_more_than_the_sum() -> None:
    """Three rows of six tokens need three bins of ten, though two would hold as many tokens."""
    assert least_bins(np.array([6, 6, 6]), 10) == fewest_bins([6, 6, 6], 10) == 3
    assert least_bins(np.array([7, 7, 4, 4, 4]), 10) == 4, "no row of four fits beside one of seven"


def test_the_bound_of_a_million_rows_costs_next_to_nothing() -> None:
    lengths = np.random.default_rng(0).integers(1, 2049, 1_000_000).astype(np.int32)
    started = time.process_time()
    bound = least_bins(lengths, 2048)
    assert time.process_time() - started <= 0.25
    planned = len(plan_bins(lengths, 2048)[1])
    assert bound <= planned <= 1.001 * bound
