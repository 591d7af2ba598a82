"""A search learns: from what is low, and from what failed."""

import math
import statistics
from typing import Any

from app.sweeps.optuna_search import STARTUP_TRIALS, suggest
from app.sweeps.search_space import dimensions_in
from app.sweeps.trials import FAILED
from tests.sweeps.test_optuna_search import ended, search, valley


def test_what_failed_is_not_tried_again_and_again() -> None:
    """Rates above a cliff are not a number; a search that forgets failures falls down it most of the time."""
    failed = []
    for seed in range(4):
        found = ended(
            search(trials=16, seed=seed), lambda v: None if v["optimizer.lr"] > 0.012 else valley(v)
        )
        assert len(found) == 16
        failed.append(sum(each.status == FAILED for each in found))
    assert statistics.mean(failed) < 8
    everything = ended(search(trials=6), lambda _: None)
    assert len({each.swept for each in everything}) == 6


def test_it_finds_a_minimum_better_than_chance() -> None:
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
