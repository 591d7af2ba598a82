"""Losses over pairs of answers: their formulas, written out one pair at a time."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from app.batch import Batch
from app.config.kinds import balance_notes
from app.config.load import compose_run
from app.config.schema import PreferenceConfig
from app.tasks.preference import PREFERENCES, log_ratios, loss_of_labeled, loss_of_pairs

SUMS = [-3.0, -7.5, -40.0, -2.0]  # wanted, unwanted, wanted, unwanted
TOKENS = [2, 5, 8, 1]
REFERENCE = [-4.0, -6.0, -41.0, -5.5]


def settings(kind: str) -> PreferenceConfig:
    return compose_run(["recipe=dpo", f"preference={kind}"]).preference


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def log_odds(x: float) -> float:
    return math.log(math.exp(x) / (1 - math.exp(x)))


Pair = tuple[float, float, float, float, int, int]  # w, r, their references, their tokens


def dpo(pair: Pair, own: PreferenceConfig) -> float:
    w, r, rw, rr, _, _ = pair
    margin, s = own.beta * ((w - rw) - (r - rr)), own.label_smoothing
    return -(1 - s) * log_sigmoid(margin) - s * log_sigmoid(-margin)


def robust(pair: Pair, own: PreferenceConfig) -> float:
    w, r, rw, rr, _, _ = pair
    margin, s = own.beta * ((w - rw) - (r - rr)), own.label_smoothing
    return (-(1 - s) * log_sigmoid(margin) + s * log_sigmoid(-margin)) / (1 - 2 * s)


def ipo(pair: Pair, own: PreferenceConfig) -> float:
    w, r, rw, rr, nw, nr = pair
    return ((w - rw) / nw - (r - rr) / nr - 1 / (2 * own.beta)) ** 2


def simpo(pair: Pair, own: PreferenceConfig) -> float:
    w, r, _, _, nw, nr = pair
    return -log_sigmoid(own.beta * (w / nw - r / nr) - own.gamma)


def orpo(pair: Pair, own: PreferenceConfig) -> float:
    w, r, _, _, nw, nr = pair
    return -own.beta * log_sigmoid(log_odds(w / nw) - log_odds(r / nr))


FORMULAS: dict[str, Callable[[Pair, PreferenceConfig], float]] = {
    "dpo": dpo,
    "robust": robust,
    "ipo": ipo,
    "simpo": simpo,
    "orpo": orpo,
}


def batch(*, reference: bool) -> Batch:
    of_label = torch.repeat_interleave(torch.arange(4), torch.tensor(TOKENS))
    nothing = torch.zeros(1, 1, dtype=torch.long)
    return Batch(
        ids=nothing,
        positions=nothing,
        label_rows=of_label,
        targets=of_label,
        lengths=(1,) * 4,
        num_labels=len(of_label),
        num_tokens=4,
        rows=(2, 2),
        document_of_label=of_label,
        document_values=torch.tensor(REFERENCE, dtype=torch.float64)[:, None] if reference else None,
    )


def test_every_loss_has_its_formula() -> None:
    assert FORMULAS.keys() == PREFERENCES.keys()


@pytest.mark.parametrize("kind", FORMULAS)
@pytest.mark.parametrize("changes", [{}, {"sft": 0.3, "beta": 0.5}])
def test_loss_of_pairs_equals_its_formula(kind: str, changes: dict[str, Any]) -> None:
    own = replace(settings(kind), **changes)
    found = loss_of_pairs(own, torch.tensor(SUMS, dtype=torch.float64), batch(reference=own.has_reference))
    for at, loss in zip((0, 2), found.tolist(), strict=True):
        (w, r), (rw, rr), (nw, nr) = (each[at : at + 2] for each in (SUMS, REFERENCE, TOKENS))
        expected = FORMULAS[kind]((w, r, rw, rr, int(nw), int(nr)), own) - own.sft * w / nw
        assert loss == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kind", FORMULAS)
def test_loss_of_sure_answers_is_finite_with_its_gradient(kind: str) -> None:
    own = settings(kind)
    for values in ([0.0, 0.0, -1e-12, -1e4], [-1e4, 0.0, -2000.0, -2000.0]):
        sums = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        found = loss_of_pairs(own, sums, batch(reference=own.has_reference))
        found.sum().backward()
        assert found.isfinite().all()
        assert sums.grad is not None
        assert sums.grad.isfinite().all()


def labeled(wanted: list[bool], step_mean: float) -> Batch:
    values = torch.tensor([REFERENCE, list(map(float, wanted))], dtype=torch.float64).T
    return replace(
        batch(reference=True), rows=(), document_values=values, step_mean=torch.tensor(step_mean, dtype=torch.float64)
    )


@pytest.mark.parametrize("mean_ratio", [0.7, -0.7])
def test_kto_equals_its_formula(mean_ratio: float) -> None:
    wanted = [True, False, False, True]
    own = replace(compose_run(["recipe=kto"]).preference, beta=0.3, desirable=0.8, undesirable=1.5)
    sums, given = torch.tensor(SUMS, dtype=torch.float64), labeled(wanted, mean_ratio)
    found = loss_of_labeled(own, sums, given)
    assert log_ratios(sums, given).tolist() == [s - r for s, r in zip(SUMS, REFERENCE, strict=True)]
    for s, r, is_wanted, loss in zip(SUMS, REFERENCE, wanted, found.tolist(), strict=True):
        gain = own.beta * (s - r) - own.beta * max(0.0, mean_ratio)
        expected = own.desirable / (1 + math.exp(gain)) if is_wanted else own.undesirable / (1 + math.exp(-gain))
        assert loss == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("weights", "rows", "note"),
    [
        ((1.0, 1.0), (100, 100), ""),
        ((1.0, 1.0), (400, 300), ""),
        ((1.0, 1.0), (900, 100), "Set preference.undesirable=9 for a ratio of 1"),
        ((1.0, 1.0), (100, 300), "Set preference.desirable=3 for a ratio of 1"),
        ((1.0, 9.0), (900, 100), ""),
    ],
)
def test_labels_out_of_balance_are_noted(weights: tuple[float, float], rows: tuple[int, int], note: str) -> None:
    keys = ("preference.desirable", "preference.undesirable")
    found = [*balance_notes(dict(zip(keys, weights, strict=True)), dict(zip(("true", "false"), rows, strict=True)))]
    assert len(found) == bool(note)
    assert not note or found[0].endswith(note)
