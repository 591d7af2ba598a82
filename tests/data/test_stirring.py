"""Rows get new neighbours in each epoch, and what a plan promises holds all the same."""

import time
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.data.layout import Packed, Units
from app.data.packing import plan_bins
from app.data.stirring import stirred
from tests.data.test_layout import rows_of


def bins_of(units: Units) -> list[list[int]]:
    return [part.tolist() for part in np.split(units.order, units.starts[1:])]


def neighbours(units: Units) -> set[tuple[int, int]]:
    return {pair for members in bins_of(units) for pair in combinations(sorted(members), 2)}


def epoch_of(layout: Packed, lengths: list[int], epoch: int, *, stir: bool = True) -> Units:
    random = np.random.default_rng([0, epoch])
    stirring = np.random.default_rng([0, epoch, 1]) if stir else None
    return layout.units(rows_of(lengths), random.permutation(len(lengths)), stirring)


def chats(count: int, median: int = 120) -> list[int]:
    drawn = np.random.default_rng(0).lognormal(np.log(median), 0.8, count)
    return [int(length) for length in np.clip(drawn, 4, 2048)]


@given(
    st.lists(st.integers(2, 30), min_size=1, max_size=80),
    st.integers(30, 90),
    st.integers(30, 90),
    st.integers(0, 9),
)
def test_every_row_once_and_bins_as_they_were_planned(
    lengths: list[int], tokens: int, longest: int, epoch: int
) -> None:
    layout = Packed(tokens, pad_id=0, longest=min(longest, tokens))
    plain, found = (epoch_of(layout, lengths, epoch, stir=stir) for stir in (False, True))
    assert sorted(found.order.tolist()) == list(range(len(lengths)))
    assert found.starts.tolist() == plain.starts.tolist()
    assert found.most_documents == plain.most_documents
    for members in bins_of(found):
        room = tokens - sum(lengths[row] for row in members)
        assert room >= 0
        assert len(members) + -(-room // layout.longest) <= found.most_documents


@pytest.mark.parametrize(
    ("count", "median", "kept"), [(60, 120, 0.5), (60, 400, 0.3), (500, 120, 0.2), (500, 400, 0.2)]
)
def test_most_neighbours_are_new_where_hardly_two_rows_are_equally_long(
    count: int, median: int, kept: float
) -> None:
    layout, lengths = Packed(2048, pad_id=0, longest=2048), chats(count, median)
    shares = {}
    for stir in (False, True):
        first, second = (neighbours(epoch_of(layout, lengths, epoch, stir=stir)) for epoch in (1, 2))
        shares[stir] = len(first & second) / len(first)
    assert shares[True] < kept < 0.7 < shares[False]


def test_the_same_epoch_is_the_same_each_time() -> None:
    layout, lengths = Packed(2048, pad_id=0, longest=2048), chats(500)
    one, again, other = (epoch_of(layout, lengths, epoch) for epoch in (3, 3, 4))
    assert one.order.tolist() == again.order.tolist() != other.order.tolist()


def test_a_million_rows_cost_about_as_much_as_their_plan() -> None:
    lengths: NDArray[np.int32] = np.tile(np.array(chats(10_000), np.int32), 100)
    order, starts = plan_bins(lengths, 2048)
    begun = time.process_time()
    found = stirred(order, starts, lengths[order], 2048, np.full(len(starts), 2048), np.random.default_rng(0))
    assert time.process_time() - begun < 5
    assert not np.array_equal(found, order)
