"""Intervals hold what they promise: the true figure, nineteen times out of twenty."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from app.evaluation.bootstrap import RESAMPLES, bound_of_none, interval, num_clusters, resampled

Numbers = NDArray[np.float64]


def hashes(count: int, seed: int = 0) -> NDArray[np.uint64]:
    return np.random.default_rng(seed).integers(0, 2**63, size=count, dtype=np.uint64)


def conversations(random: np.random.Generator, count: int, turns: int) -> tuple[Numbers, NDArray[np.uint64]]:
    """Rows whose turns are alike: their mean loss is 2 over all tokens, however long they are."""
    level = random.gamma(2.0, size=count).repeat(turns)
    tokens = random.integers(5, 40, size=count * turns).astype(float)
    loss = level * tokens + random.normal(size=count * turns)
    return np.stack([loss, tokens], axis=1), hashes(count).repeat(turns)


@pytest.mark.parametrize(("count", "groups"), [(100, 2_048), (900, 128)])
def test_the_true_mean_lies_within_nineteen_times_out_of_twenty(count: int, groups: int) -> None:
    """Rows of several turns are drawn as one, and many rows in groups."""
    random = np.random.default_rng(5)
    within = []
    for _ in range(250):
        sums, clusters = conversations(random, count, turns=3)
        drawn = resampled(sums, clusters, groups)
        low, high = interval(drawn[:, 0] / drawn[:, 1])
        within.append(low <= 2.0 <= high)
    assert 0.915 <= np.mean(within) <= 0.98


def test_turns_of_one_row_are_no_rows_of_their_own() -> None:
    sums, clusters = conversations(np.random.default_rng(0), 200, turns=4)
    widths = []
    for ways in (clusters, hashes(len(clusters))):
        drawn = resampled(sums, ways)
        low, high = interval(drawn[:, 0] / drawn[:, 1])
        widths.append(high - low)
    assert widths[0] > 1.6 * widths[1], "four turns that are alike are worth little more than one"


def test_draws_have_the_mean_and_the_spread_of_the_rows() -> None:
    """Also where rows are drawn in groups: against the textbook's standard error."""
    values = np.random.default_rng(1).exponential(size=5_000)
    for groups in (2_048, 10_000):
        total, count = resampled(np.stack([values, np.ones(5_000)], axis=1), hashes(5_000), groups).T
        drawn = total / count
        assert drawn.shape == (RESAMPLES,)
        assert drawn.mean() == pytest.approx(values.mean(), rel=2e-3)
        assert drawn.std() == pytest.approx(values.std() / math.sqrt(5_000), rel=0.06)


def test_every_row_counts_as_often_as_there_are_rows() -> None:
    ones = np.ones((4_097, 1))
    drawn = resampled(ones, hashes(4_097))
    assert set(np.unique(drawn)) <= {*range(3_900, 4_300)}, "groups differ by one row"
    assert (resampled(ones[:2_000], hashes(2_000)) == 2_000).all()


def test_the_order_of_rows_and_what_stands_beside_them_change_nothing() -> None:
    sums, clusters = conversations(np.random.default_rng(2), 60, turns=2)
    first = resampled(sums, clusters)
    order = np.random.default_rng(3).permutation(len(sums))
    assert resampled(sums[order], clusters[order]) == pytest.approx(first, rel=1e-12)
    beside = resampled(np.concatenate([sums, sums[:, :1]], axis=1), clusters)
    assert (beside[:, 2] == beside[:, 0]).all(), "both sides of a comparison see the same rows"
    assert beside[:, :2] == pytest.approx(first)
    assert num_clusters(clusters) == 60


def test_an_interval_is_of_the_middle_and_takes_infinity() -> None:
    assert interval(np.random.default_rng(0).permutation(np.arange(1.0, 2_001.0))) == (50.0, 1_951.0)
    assert interval(np.full(2_000, math.inf)) == (math.inf, math.inf)
    assert math.isnan(interval(np.full(2_000, math.nan))[0])


def test_rows_without_a_hit_leave_a_small_share_possible() -> None:
    """As many rows without a hit would be seen once in forty times at that share."""
    for rows in (1, 12, 1_000):
        assert (1 - bound_of_none(rows)) ** rows == pytest.approx(0.025)
