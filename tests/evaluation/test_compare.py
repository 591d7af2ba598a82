"""Two models on the same rows: what is written, what is shown, and what is left out."""

import json
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from app.evaluation.compare import SideBySide
from app.training.scores import ANSWERS, EXACT, HITS, LABELS, LOSS, WEIGHT, Sums

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


def test_both_and_their_difference_each_with_an_interval() -> None:
    tuned, base = sums_of(400, 1.0, 0.6, 0.5), sums_of(400, 3.0, 0.1, 0.05)
    found = SideBySide.of({"tuned": tuned, "base": base}, sides(400)).as_dict()
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


def test_the_difference_is_of_the_same_rows() -> None:
    """Rows that are hard for both make both intervals wide and that of the difference none the wider."""
    base = sums_of(300, 3.0, 0.3, 0.2)
    tuned = base.copy()
    tuned[:, LOSS] -= tuned[:, LABELS] * 0.1
    found = SideBySide.of({"tuned": tuned, "base": base}, sides(300)).as_dict()
    assert found["difference_eval_loss_interval"] == pytest.approx([-0.1, -0.1])
    low, high = found["base_eval_loss_interval"]
    assert high - low > 0.2
    assert found["difference_exact_match_interval"] == [0.0, 0.0]


def test_no_hit_at_all_is_no_proof_that_there_never_is_one() -> None:
    nothing, everything = sums_of(40, 3.0, 0.0, 0.0), sums_of(40, 1.0, 1.0, 1.0)
    found = SideBySide.of({"tuned": everything, "base": nothing}, sides(40)).as_dict()
    far = 1 - 0.025 ** (1 / 40)
    for key in ("token_accuracy", "exact_match"):
        assert found[f"base_{key}_interval"] == pytest.approx([0.0, far])
        assert found[f"tuned_{key}_interval"] == pytest.approx([1 - far, 1.0])
        assert found[f"difference_{key}_interval"] == pytest.approx([1 - 2 * far, 1.0])
    same = SideBySide.of({"tuned": nothing, "base": nothing}, sides(40)).as_dict()
    assert same["difference_exact_match_interval"] == pytest.approx([-far, far])


def test_what_has_no_answers_has_no_exact_match() -> None:
    sums = sums_of(50, 2.0, 0.4, 0.0)
    sums[:, [ANSWERS, EXACT]] = 0
    found = SideBySide.of({"tuned": sums, "base": sums}, sides(50))
    assert {value for key, value in found.as_dict().items() if "exact_match" in key} == {None}
    assert "exact" not in found.table()
    assert found.answers == 0


def test_one_row_has_no_interval_and_json_takes_what_is_not_finite() -> None:
    alone = SideBySide.of({"tuned": sums_of(1, 2.0, 0.4, 0.5)}, sides(1))
    assert {value for key, value in alone.as_dict().items() if key.endswith("_interval")} == {None}
    assert "one row alone says nothing of others: no intervals" in alone.table()
    assert "[" not in alone.table()
    for bad in (math.nan, math.inf, 1e6):
        ruined = sums_of(9, 2.0, 0.4, 0.5)
        ruined[3, LOSS] = bad
        found = SideBySide.of({"tuned": ruined, "base": ruined}, sides(9))
        assert json.dumps(found.as_dict(), allow_nan=False)
        assert found.as_dict()["perplexity"] is None
        assert found.table()


def test_the_table() -> None:
    tuned, base = sums_of(400, 1.0, 0.6, 0.5), sums_of(400, 3.0, 0.1, 0.05)
    lines = SideBySide.of({"tuned": tuned, "base": base}, sides(400)).table().splitlines()
    assert lines[0].split() == ["base", "tuned", "difference"]
    assert [line.split("   ")[0] for line in lines[1:5]] == [
        "loss",
        "perplexity",
        "token accuracy",
        "exact match",
    ]
    assert lines[1].split()[-3].startswith("-")
    assert lines[4].split()[-3].startswith("+")
    assert lines[5] == "[95% intervals: 2,000 draws of 400 rows, the same ones for both]"
    (alone, *_, how) = SideBySide.of({"base": base}, sides(400)).table().splitlines()
    assert alone.split() == ["base"]
    assert how == "[95% intervals: 2,000 draws of 400 rows]"
