"""Ladders in full size, and searches that learn from objectives and failures."""

import math
import statistics
from typing import Any

import pytest

from app.config.conf_files import choices_by_group
from app.sweeps.ladder import LADDER
from app.sweeps.search import STARTUP_TRIALS, suggest
from app.sweeps.search_space import dimensions_in, read_preset
from app.sweeps.sweep import plan_sweep
from app.sweeps.trials import FAILED, values_of
from tests.sweeps.test_ladder import FEW, LADDERS, NAMES, check_ladder, check_small_ladder
from tests.sweeps.test_search import ended, rate_of, search, valley
from tests.sweeps.test_sweep import nothing_more


@pytest.mark.parametrize("name", NAMES)
def test_ladder_composes(name: str) -> None:
    check_ladder(name, "full")


@pytest.mark.parametrize("name", [name for name in NAMES if len(LADDERS[name].rungs) > FEW])
def test_long_ladder_small_makes_ten_steady_steps_of_rows(name: str) -> None:
    check_small_ladder(name)


PRESETS = [n for n in choices_by_group()["sweep"] if read_preset([f"sweep={n}"]).config.proposer != LADDER]


def test_search_failed_region_avoided() -> None:
    """Rates above a cliff are not a number; a search that forgets failures falls down it most of the time."""
    failed = []
    for seed in range(4):
        found = ended(search(trials=16, seed=seed), lambda v: None if v["optimizer.lr"] > 0.012 else valley(v))
        assert len(found) == 16
        failed.append(sum(each.status == FAILED for each in found))
    assert statistics.mean(failed) < 8
    everything = ended(search(trials=6), lambda _: None)
    assert len({each.swept for each in everything}) == 6


def test_search_better_than_random() -> None:
    space, wrong = dimensions_in(
        {
            "optimizer.lr": {"low": 1e-5, "high": 1e-1, "log": True},
            "adapter.dropout": {"low": 0.0, "high": 1.0},
            "adapter.r": [8, 16, 32, 64],
        }
    )
    assert wrong == []

    def best(seed: int, startup: int) -> float:
        points: list[tuple[Any, float | None]] = []
        for number in range(1, 41):
            point = suggest(space, points, seed=seed, number=number, startup=startup)
            rate = (math.log10(point["optimizer.lr"]) + 3.2) ** 2
            rank = abs(math.log2(int(point["adapter.r"].partition("=")[2]) / 32)) / 10
            points.append((point, rate + (point["adapter.dropout"] - 0.3) ** 2 + rank))
        return min(objective for _, objective in points if objective is not None)

    by_search, by_chance = ([best(seed, startup) for seed in range(10)] for startup in (STARTUP_TRIALS, 1000))
    assert statistics.mean(by_search) < statistics.mean(by_chance) / 2
    assert statistics.median(by_search) < statistics.median(by_chance) / 2


def test_search_swept_setting_is_dimension() -> None:
    found = ended(search("recipe=full,lora", trials=6, space={"optimizer.lr": {"low": "0.5x", "high": "2x"}}))
    rates: dict[str, list[float]] = {"full": [], "lora": []}
    for each in found:
        values = values_of(each.swept)
        rates[values["recipe"]].append(values["optimizer.lr"])
    assert found[0].overrides == ("recipe=full", f"optimizer.lr={rate_of('full')}")
    for recipe, found_rates in rates.items():
        assert all(rate_of(recipe) / 2 <= rate <= rate_of(recipe) * 2 for rate in found_rates)
    assert rates["lora"]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_make_valid_trials(name: str) -> None:
    plan = plan_sweep(["-m", f"sweep={name}"], nothing_more)
    assert len(plan.runs) == len(plan.proposer.points)
    assert 5 <= plan.proposer.count <= 12
    assert plan.notes
