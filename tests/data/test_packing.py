"""The plan loses nothing, never overflows, is that of placing row by row, and no plan is better than the bound.

Rows get new neighbors in each epoch, and what a plan promises holds all the same.
"""

import hashlib
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.data.collate import Packed, Units
from app.data.packing import min_bins, plan_bins
from tests.data.test_collate import rows_of


def contents(lengths: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """The rows of each bin."""
    order, starts = plan_bins(lengths, capacity)
    return [part.tolist() for part in np.split(order, starts[1:])] if len(starts) else []


def placed_one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Best-fit-decreasing row by row, each into the fullest bin that takes it; returns the free tokens of each bin."""
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
def test_plan_bins_equals_row_by_row(case: tuple[int, list[int]]) -> None:
    capacity, rows = case
    lengths = np.array(rows, np.int64)
    bins = contents(lengths, capacity)
    assert sorted(row for members in bins for row in members) == list(range(len(rows)))
    rooms = [capacity - int(lengths[members].sum()) for members in bins]
    assert all(0 <= room < capacity for room in rooms)
    assert sorted(rooms) == placed_one_by_one(rows, capacity)
    assert -(-sum(rows) // capacity) <= min_bins(lengths, capacity) <= len(bins)


def test_plan_bins_of_chat_lengths_full() -> None:
    """Lognormal, median 490 tokens, clipped at the capacity: the shape of chat data."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(490), 0.8, 100_000), 1, 2048).astype(np.int32)
    _, starts = plan_bins(lengths, 2048)
    assert lengths.sum() / (len(starts) * 2048) >= 0.999
    assert len(starts) <= 1.001 * min_bins(lengths, 2048)


def test_min_bins_exceeds_sum() -> None:
    """Three rows of six tokens need three bins of ten, though two would hold as many tokens."""
    assert min_bins(np.array([6, 6, 6]), 10) == 3
    assert min_bins(np.array([7, 7, 4, 4, 4]), 10) == 4, "no row of four fits beside one of seven"


def bins_of(units: Units) -> list[list[int]]:
    return [part.tolist() for part in np.split(units.order, units.starts[1:])]


def neighbors(units: Units) -> set[tuple[int, int]]:
    return {pair for members in bins_of(units) for pair in combinations(sorted(members), 2)}


def epoch_of(layout: Packed, lengths: list[int], epoch: int, *, stir: bool = True) -> Units:
    random = np.random.default_rng([0, epoch])
    stirring = np.random.default_rng([0, epoch, 1]) if stir else None
    return layout.units(rows_of(lengths), random.permutation(len(lengths)), stirring)


def chats(count: int, median: int = 120) -> list[int]:
    drawn = np.random.default_rng(0).lognormal(np.log(median), 0.8, count)
    return [int(length) for length in np.clip(drawn, 4, 2048)]


@given(
    st.lists(st.integers(2, 30), min_size=1, max_size=80), st.integers(30, 90), st.integers(30, 90), st.integers(0, 9)
)
def test_shuffle_bins_keeps_rows_and_bins(lengths: list[int], tokens: int, longest: int, epoch: int) -> None:
    layout = Packed(tokens, pad_id=0, max_length=min(longest, tokens))
    plain, found = (epoch_of(layout, lengths, epoch, stir=stir) for stir in (False, True))
    assert sorted(found.order.tolist()) == list(range(len(lengths)))
    assert found.starts.tolist() == plain.starts.tolist()
    assert found.max_documents == plain.max_documents
    for members in bins_of(found):
        room = tokens - sum(lengths[row] for row in members)
        assert room >= 0
        assert len(members) + -(-room // layout.max_length) <= found.max_documents


@pytest.mark.parametrize(
    ("count", "median", "kept"), [(60, 120, 0.5), (60, 400, 0.3), (500, 120, 0.2), (500, 400, 0.2)]
)
def test_shuffle_bins_renews_neighbors(count: int, median: int, kept: float) -> None:
    layout, lengths = Packed(2048, pad_id=0, max_length=2048), chats(count, median)
    shares = {}
    for stir in (False, True):
        first, second = (neighbors(epoch_of(layout, lengths, epoch, stir=stir)) for epoch in (1, 2))
        shares[stir] = len(first & second) / len(first)
    assert shares[True] < kept < 0.7 < shares[False]


def test_shuffle_bins_golden_digest() -> None:
    """A run that goes on after an update of the program must find the same rows in its next step."""
    digest = hashlib.sha256()
    for epoch in range(4):
        units = epoch_of(Packed(2048, pad_id=0, max_length=2048), chats(500), epoch, stir=epoch > 0)
        digest.update(units.order.tobytes() + units.starts.tobytes() + bytes([units.max_documents]))
    assert digest.hexdigest()[:16] == "ec12e270afce0ae7"
