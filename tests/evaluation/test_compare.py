"""Two models on the same rows, with bootstrap intervals."""

import json
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from app.evaluation.compare import ModelComparison, bound_of_none, interval, resampled
from app.tasks.interface import ANSWERS, EXACT, HITS, LABELS, LOSS, WEIGHT, Sums
from app.tasks.table import counts_of
from tests.training.conftest import small_run

COUNTS = counts_of(small_run())
Numbers = NDArray[np.float64]
KEYS = ["eval_loss", "perplexity", "token_accuracy", "exact_match"]


def sums_of(rows: int, loss: float, hits: float, exact: float, seed: int = 0) -> Sums:
    random = np.random.default_rng(seed)
    sums = np.zeros((rows, 6))
    sums[:, LABELS] = random.integers(2, 9, size=rows)
    sums[:, WEIGHT] = sums[:, LABELS]
    sums[:, LOSS] = sums[:, LABELS] * random.gamma(4.0, loss / 4, size=rows)
    sums[:, HITS] = random.binomial(sums[:, LABELS].astype(int), hits)
    sums[:, ANSWERS] = 1 + (random.random(rows) < 0.5)
    sums[:, EXACT] = random.binomial(sums[:, ANSWERS].astype(int), exact)
    return sums


def sides(rows: int) -> NDArray[np.uint64]:
    return np.random.default_rng(9).integers(0, 2**63, size=rows, dtype=np.uint64)


def test_comparison_has_intervals_of_both_sides_and_the_difference() -> None:
    tuned, base = sums_of(400, 1.0, 0.6, 0.5), sums_of(400, 3.0, 0.1, 0.05)
    found = ModelComparison.of({"tuned": tuned, "base": base}, sides(400), COUNTS).as_dict()
    names = [f"{side}{key}" for side in ("", "tuned_", "base_", "difference_") for key in KEYS]
    assert sorted(found) == sorted([*names, *(f"{name}_interval" for name in names)])
    assert found["eval_loss"] == found["tuned_eval_loss"]
    assert found["eval_loss"] == pytest.approx(tuned[:, LOSS].sum() / tuned[:, LABELS].sum())
    assert found["base_exact_match"] == base[:, EXACT].sum() / base[:, ANSWERS].sum()
    for name in names:
        low, high = found[f"{name}_interval"]
        assert low < found[name] < high
    for key in KEYS:
        assert found[f"difference_{key}"] == found[f"tuned_{key}"] - found[f"base_{key}"]
    bounds = [math.exp(x) for x in found["tuned_eval_loss_interval"]]
    assert found["tuned_perplexity_interval"] == pytest.approx(bounds)


def test_difference_is_paired_by_rows() -> None:
    """Rows that are hard for both models widen both intervals, but not that of the difference."""
    base = sums_of(300, 3.0, 0.3, 0.2)
    tuned = base.copy()
    tuned[:, LOSS] -= tuned[:, LABELS] * 0.1
    found = ModelComparison.of({"tuned": tuned, "base": base}, sides(300), COUNTS).as_dict()
    assert found["difference_eval_loss_interval"] == pytest.approx([-0.1, -0.1])
    low, high = found["base_eval_loss_interval"]
    assert high - low > 0.2
    assert found["difference_exact_match_interval"] == [0.0, 0.0]


def test_share_of_zero_or_one_keeps_an_interval() -> None:
    nothing, everything = sums_of(40, 3.0, 0.0, 0.0), sums_of(40, 1.0, 1.0, 1.0)
    found = ModelComparison.of({"tuned": everything, "base": nothing}, sides(40), COUNTS).as_dict()
    far = 1 - 0.025 ** (1 / 40)
    for key in ("token_accuracy", "exact_match"):
        assert found[f"base_{key}_interval"] == pytest.approx([0.0, far])
        assert found[f"tuned_{key}_interval"] == pytest.approx([1 - far, 1.0])
        assert found[f"difference_{key}_interval"] == pytest.approx([1 - 2 * far, 1.0])
    same = ModelComparison.of({"tuned": nothing, "base": nothing}, sides(40), COUNTS).as_dict()
    assert same["difference_exact_match_interval"] == pytest.approx([-far, far])


def test_rows_without_answers_have_no_exact_match() -> None:
    sums = sums_of(50, 2.0, 0.4, 0.0)
    sums[:, [ANSWERS, EXACT]] = 0
    found = ModelComparison.of({"tuned": sums, "base": sums}, sides(50), COUNTS)
    assert {value for key, value in found.as_dict().items() if "exact_match" in key} == {None}
    assert "exact" not in found.table()
    assert found.answers == 0


def test_one_row_has_no_interval_and_infinite_values_are_json() -> None:
    alone = ModelComparison.of({"tuned": sums_of(1, 2.0, 0.4, 0.5)}, sides(1), COUNTS)
    assert {value for key, value in alone.as_dict().items() if key.endswith("_interval")} == {None}
    assert "only one row: no confidence intervals" in alone.table()
    assert "[" not in alone.table()
    for bad in (math.nan, math.inf, 1e6):
        ruined = sums_of(9, 2.0, 0.4, 0.5)
        ruined[3, LOSS] = bad
        found = ModelComparison.of({"tuned": ruined, "base": ruined}, sides(9), COUNTS)
        assert json.dumps(found.as_dict(), allow_nan=False)
        assert found.as_dict()["perplexity"] is None
        assert found.table()


def test_table_has_base_tuned_and_difference() -> None:
    tuned, base = sums_of(400, 1.0, 0.6, 0.5), sums_of(400, 3.0, 0.1, 0.05)
    lines = ModelComparison.of({"tuned": tuned, "base": base}, sides(400), COUNTS).table().splitlines()
    assert lines[0].split() == ["base", "tuned", "difference"]
    assert [line.split("   ")[0] for line in lines[1:5]] == ["loss", "perplexity", "token accuracy", "exact match"]
    assert lines[1].split()[-3].startswith("-")
    assert lines[4].split()[-3].startswith("+")
    assert lines[5] == "[95% intervals: 2,000 resamples of 400 rows, paired]"
    (alone, *_, how) = ModelComparison.of({"base": base}, sides(400), COUNTS).table().splitlines()
    assert alone.split() == ["base"]
    assert how == "[95% intervals: 2,000 resamples of 400 rows]"


def hashes(count: int, seed: int = 0) -> NDArray[np.uint64]:
    return np.random.default_rng(seed).integers(0, 2**63, size=count, dtype=np.uint64)


def conversations(random: np.random.Generator, count: int, turns: int) -> tuple[Numbers, NDArray[np.uint64]]:
    """Clusters of turns with similar losses, whose mean over all tokens is 2."""
    level = random.gamma(2.0, size=count).repeat(turns)
    tokens = random.integers(5, 40, size=count * turns).astype(float)
    loss = level * tokens + random.normal(size=count * turns)
    return np.stack([loss, tokens], axis=1), hashes(count).repeat(turns)


@pytest.mark.parametrize(("count", "groups"), [(100, 2_048), (900, 128)])
def test_interval_covers_the_mean_95_percent_of_times(count: int, groups: int) -> None:
    """Rows of a cluster are drawn together, and many rows in groups."""
    random = np.random.default_rng(5)
    within = []
    for _ in range(250):
        sums, clusters = conversations(random, count, turns=3)
        drawn = resampled(sums, clusters, groups)
        low, high = interval(drawn[:, 0] / drawn[:, 1])
        within.append(low <= 2.0 <= high)
    assert 0.915 <= np.mean(within) <= 0.98


def test_clustered_rows_widen_the_interval() -> None:
    sums, clusters = conversations(np.random.default_rng(0), 200, turns=4)
    widths = []
    for ways in (clusters, hashes(len(clusters))):
        drawn = resampled(sums, ways)
        low, high = interval(drawn[:, 0] / drawn[:, 1])
        widths.append(high - low)
    assert widths[0] > 1.6 * widths[1], "four turns that are alike are worth little more than one"


def test_resamples_do_not_depend_on_row_order_or_other_columns() -> None:
    sums, clusters = conversations(np.random.default_rng(2), 60, turns=2)
    first = resampled(sums, clusters)
    order = np.random.default_rng(3).permutation(len(sums))
    assert resampled(sums[order], clusters[order]) == pytest.approx(first, rel=1e-12)
    beside = resampled(np.concatenate([sums, sums[:, :1]], axis=1), clusters)
    assert (beside[:, 2] == beside[:, 0]).all(), "both sides of a comparison see the same rows"
    assert beside[:, :2] == pytest.approx(first)


def test_interval_is_central_and_takes_infinity() -> None:
    assert interval(np.random.default_rng(0).permutation(np.arange(1.0, 2_001.0))) == (50.0, 1_951.0)
    assert interval(np.full(2_000, math.inf)) == (math.inf, math.inf)
    assert math.isnan(interval(np.full(2_000, math.nan))[0])


def test_bound_of_none_is_exact_binomial() -> None:
    """With that share, so many rows without a hit have a probability of 2.5 %."""
    for rows in (1, 12, 1_000):
        assert (1 - bound_of_none(rows)) ** rows == pytest.approx(0.025)
