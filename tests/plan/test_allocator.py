"""The simulated allocator: exact where it can be worked out by hand, and never less than what lives."""

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.plan.allocator import Allocator, footprint

MIB = 1 << 20
A, B, C, D = range(4)

# name: requests in MiB, what native segments and what expandable ones take
BY_HAND: dict[str, tuple[list[tuple[int, float]], int, int]] = {
    "a byte takes a small page": ([(A, 1 / MIB)], 2, 2),
    "a small page holds two halves": ([(A, 1), (B, 1)], 2, 2),
    "small ones have a page of their own": ([(A, 1), (B, 2)], 22, 22),
    "what is a bit larger than a small one": ([(A, 1.5)], 20, 20),
    "nine fit into one segment of twenty": ([(A, 9), (B, 9)], 20, 20),
    "ten have a segment of their own": ([(A, 10)], 10, 20),
    "in steps of two": ([(A, 10.5)], 12, 20),
    "expandable pages are of twenty": ([(A, 30.5)], 32, 40),
    "freed and too small": ([(A, 30), (A, -30), (B, 40)], 70, 40),
    "freed and large enough": ([(A, 40), (A, -40), (B, 30), (C, 8)], 40, 40),
    "a rest of a mebibyte stays with its block": ([(A, 12), (A, -12), (B, 11), (C, 1.5)], 32, 20),
    "neighbours are joined": ([(A, 9), (B, 9), (A, -9), (B, -9), (C, 18)], 20, 20),
    "a hole between two that live": ([(A, 20), (B, 20), (C, 20), (B, -20), (D, 21)], 82, 100),
    "the smallest hole that fits": (
        [(A, 40), (B, 2), (C, 20), (D, 2), (A, -40), (C, -20), (4, 20), (5, 40)],
        80,
        80,
    ),
    "a hole is taken before the end that can grow": (
        [(A, 16), (B, 4), (C, 5), (A, -16), (D, 12), (4, 15)],
        52,
        40,
    ),
}


def events_of(requests: list[tuple[int, float]]) -> list[tuple[int, int]]:
    return [(which, round(size * MIB)) for which, size in requests]


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    requests, native, expandable = BY_HAND[name]
    events = events_of(requests)
    assert footprint(events, grow=False).reserved_bytes == native * MIB
    assert footprint(events, grow=True).reserved_bytes == expandable * MIB


def test_what_was_kept_lies_there_already_and_may_be_given_back() -> None:
    """10 MiB of 100 that are kept go at the start, and their place is used again."""
    events = events_of([(A, -10), (B, 10)])
    found = footprint(events, 100 * MIB, grow=True)
    assert (found.allocated_bytes, found.reserved_bytes) == (100 * MIB, 100 * MIB)
    assert footprint(events_of([(A, -10), (B, 11)]), 100 * MIB).reserved_bytes == 120 * MIB


SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(1, 60 * MIB))


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[int, int]]:
    events: list[tuple[int, int]] = []
    alive: dict[int, int] = {}
    for which, size in enumerate(draw(st.lists(SIZES, min_size=1, max_size=40))):
        events.append((which, size))
        alive[which] = size
        for gone in draw(st.lists(st.sampled_from(sorted(alive)), max_size=2, unique=True)):
            events.append((gone, -alive.pop(gone)))
        if not alive:
            alive[-which - 2] = 1
            events.append((-which - 2, 1))
    return events


@given(requests(), st.booleans())
def test_it_never_takes_less_than_lives_and_gives_no_byte_twice(
    events: list[tuple[int, int]], grow: bool
) -> None:
    allocator = Allocator(grow=grow)
    live: dict[int, int] = {}
    for which, size in events:
        if size > 0:
            allocator.allocate(which, size)
            live[which] = size
        else:
            allocator.free(which)
            del live[which]
        places = sorted(allocator.place(each) for each in live)
        for (pool, start, held), (next_pool, next_start, _) in pairwise(places):
            assert pool != next_pool or start + held <= next_start
        assert sum(held for _, _, held in places) >= sum(live.values())
        assert allocator.footprint().reserved_bytes >= sum(held for _, _, held in places)
    most = max(accumulate(size for _, size in events))
    found = allocator.footprint()
    assert most <= found.allocated_bytes <= found.reserved_bytes
    assert found.allocated_bytes <= most + 512 * len(events)


@given(requests())
def test_the_same_requests_a_second_time_take_no_more_of_expandable_segments(
    events: list[tuple[int, int]],
) -> None:
    """All is given back, joined, and found again as one."""
    alive = {which: size for which, size in events if size > 0}
    for which, size in events:
        if size < 0:
            alive.pop(which, None)
    step = [*events, *((which, -size) for which, size in alive.items())]
    assert footprint(step * 2) == footprint(step)
