"""Search by optuna's TPE."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from app.errors import ConfigError
from app.sweeps.search import STARTUP_TRIALS, Search
from app.sweeps.search_space import SweepConfig, dimensions_in, settings_of
from app.sweeps.trials import DRY_RUN, FAILED, FINISHED, RUNNING, Outcome, Trial, values_of
from tests.harness.composed import composed

SPACE = {
    "optimizer.lr": {"low": 4e-4, "high": 4e-2, "log": True},
    "adapter.r": [8, 16, 32],
    "schedule.warmup_fraction": {"low": 0.0, "high": 0.1},
}
Objective = Callable[[dict[str, Any]], float | None]


def search(*words: str, trials: int = 8, seed: int = 0, space: dict[str, Any] = SPACE) -> Search:
    settings, problems = settings_of(words)
    dimensions, wrong = dimensions_in(space)
    assert (problems, wrong) == ([], [])
    return Search([*settings, *dimensions], SweepConfig(proposer="tpe", trials=trials, seed=seed))


def outcome(trial: Trial, objective: float | None, status: str = FINISHED) -> Outcome:
    return Outcome(
        number=trial.number,
        overrides=trial.overrides,
        swept=trial.swept,
        folder=f"runs/sweep/{trial.name}",
        proposed=trial.proposed,
        status=status if objective is not None else FAILED,
        objective=objective,
    )


def valley(values: dict[str, Any]) -> float:
    warmup: float = values.get("schedule.warmup_fraction", 0.0)
    return math.log(values["optimizer.lr"] / 1e-2) ** 2 + warmup


def ended(proposer: Search, objective: Objective = valley, before: Sequence[Outcome] = ()) -> list[Outcome]:
    found = list(before)
    while trial := proposer.next(found):
        found.append(outcome(trial, objective(values_of(trial.swept))))
    return found


def rate_of(recipe: str) -> float:
    return composed(f"recipe={recipe}").optimizer.lr


def told(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [asdict(each) for each in outcomes]


def test_search_first_trial_is_own_run() -> None:
    found = ended(search("seed=1", "recipe=lora"))
    assert found[0].overrides == (
        "seed=1",
        "recipe=lora",
        f"optimizer.lr={rate_of('lora')}",
        "adapter.r=32",
        "schedule.warmup_fraction=0.03",
    )
    for each in found:
        values = values_of(each.swept)
        assert list(values) == list(SPACE)
        assert 0.0004 <= values["optimizer.lr"] <= 0.04
        assert values["adapter.r"] in (8, 16, 32)
        assert 0 <= values["schedule.warmup_fraction"] <= 0.1
    assert len({each.swept for each in found}) == len(found) == 8


def test_search_first_trial_when_run_outside_space() -> None:
    found = ended(search(trials=1, space={"optimizer.lr": {"low": 1.0, "high": 2.0}}))
    assert 1.0 <= values_of(found[0].swept)["optimizer.lr"] <= 2.0


def test_search_deterministic() -> None:
    one, same, other = (ended(search(seed=seed)) for seed in (3, 3, 4))
    assert one == same
    assert [each.swept for each in one][1:] != [each.swept for each in other][1:]


def test_search_resumed_same_trials() -> None:
    whole = ended(search())
    for stop in (1, 4, 6):
        again = search()
        recalled = again.recall(told(whole[:stop]))
        assert [(each.overrides, each.name) for each in recalled] == [
            (each.overrides, each.folder.rpartition("/")[2]) for each in whole[:stop]
        ]
        assert ended(again) == whole
    begun = [*whole[:2], replace(whole[2], status=RUNNING, objective=None)]
    again = search()
    assert len(again.recall(told(begun))) == 3
    assert ended(again) == whole


def test_search_resumed_with_multiples() -> None:
    def made() -> Search:
        space = {"optimizer.lr": {"low": "0.1x", "high": "10x", "log": True}}
        return search("seed=1", "++optimizer.lr=2e-3", trials=3, space=space)

    whole = ended(made())
    assert whole[0].overrides == ("seed=1", "optimizer.lr=0.002")
    assert all(0.0002 <= values_of(each.swept)["optimizer.lr"] <= 0.02 for each in whole)
    again = made()
    again.recall(told(whole[:2]))
    assert ended(again) == whole


def test_search_over_recipes_leaves_out_what_a_trial_does_not_read() -> None:
    proposer = search("adapter.dropout=0.1", space={"recipe": ["full", "lora"], "adapter.r": [8, 16]}, trials=3)
    whole = ended(proposer, lambda _values: 0.0)
    assert {"recipe=full", "recipe=lora"} <= {text for each in whole for text in each.overrides}
    for each in whole:
        assert ("recipe=lora" in each.overrides) == any("adapter" in text for text in each.overrides)
        assert composed(*each.overrides)
    assert [each.overrides for each in proposer.recall(told(whole))] == [each.overrides for each in whole]


def test_search_more_trials_allowed_fewer_refused() -> None:
    whole = ended(search(trials=9))
    few = ended(search(trials=5))
    more = search(trials=9)
    more.recall(told(few))
    assert ended(more) == whole
    with pytest.raises(ConfigError, match=r"sweep\.trials=5: this sweep has already started 9 trials"):
        search(trials=5).recall(told(whole))


def test_search_recorded_trial_keeps_settings() -> None:
    """It failed, and the same command tried it again."""
    first = ended(search(), lambda values: None if values["adapter.r"] == 8 else valley(values))
    assert [each.status for each in first].count(FAILED) in range(1, 8)
    again = search()
    again.recall(told(first))
    assert [each.swept for each in ended(again)] == [each.swept for each in first]


def test_search_dry_run_plans_startup_trials() -> None:
    plans: list[Outcome] = []
    proposer = search()
    while trial := proposer.next(plans):
        plans.append(outcome(trial, 0.0, DRY_RUN))
    assert len(plans) == STARTUP_TRIALS
    assert search().recall(told(plans)) == []
    assert [each.swept for each in ended(search())][:2] == [each.swept for each in plans][:2]


def test_search_finite_space_without_repetition() -> None:
    space = {
        "adapter.r": [8, 16, 32],
        "adapter.dropout": {"low": 0.0, "high": 0.2, "step": 0.1},
        "seed": {"low": 1, "high": 2},
    }
    found = ended(search(trials=40, space=space), lambda values: float(values["adapter.r"]))
    assert len({each.swept for each in found}) == 18
    assert {text.partition("=")[2] for each in found for text in each.swept if "dropout" in text} == {"0", "0.1", "0.2"}
