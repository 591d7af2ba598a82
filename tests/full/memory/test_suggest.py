"""Suggestions of settings that save memory, against plans of those settings."""

from dataclasses import replace
from typing import Any

import pytest

from app.config.load import compose_run
from app.memory.planner import Planner, Suggestions
from tests.memory.facts import GPU, MIB
from tests.memory.test_suggest import run_of

WORDS = ("model.weights=random", "recipe=full", "batching.tokens=512", "precision=bf16", "compile=none")


@pytest.fixture(scope="module")
def planned() -> Any:
    planner = Planner(replace(GPU, memory_bytes=30 * MIB, context_bytes=0))
    now = planner.at(compose_run(WORDS))
    return planner, now, Suggestions(planner, WORDS).alone(now)


def test_saved_bytes_are_difference_of_two_plans(planned: Any) -> None:
    planner, now, suggestions = planned
    assert {" ".join(each.candidate.overrides) for each in suggestions} >= {
        "training.recompute=true",
        "batching.tokens=256 batching.accumulation=2",
        "optimizer=adamw_8bit",
        "recipe=lora",
    }
    for each in suggestions[:2]:
        other = planner.at(compose_run([*WORDS, *each.candidate.overrides]))
        assert each.saves_bytes == now.verdict.needed_bytes - other.verdict.needed_bytes > 0
    costs = [each.candidate.costs for each in suggestions]
    assert costs == sorted(costs)


def test_slower_by_counts_recomputation(planned: Any) -> None:
    slower = {each.candidate.overrides[0]: each.slower_by for each in planned[2]}
    assert 0.2 < slower["training.recompute=true"] < 0.34  # forward of the layers once more, without the head
    assert slower["optimizer=adamw_8bit"] == 0
    assert slower["recipe=lora"] < 0


def test_together_combines_suggestions_until_they_fit(planned: Any) -> None:
    planner, now, suggestions = planned
    wanted = ("training.recompute=true", "optimizer=adamw_8bit")
    two = [each for each in suggestions if each.candidate.overrides[0] in wanted]
    run = run_of(WORDS, [each.candidate for each in two])
    assert run is not None
    both = planner.at(run).verdict.needed_bytes
    memory = round((both - now.verdict.margin_bytes) / 0.96)  # 3 % are margin
    found = Suggestions(Planner(replace(planner.machine, memory_bytes=memory)), WORDS).together(now, two)
    assert found is not None
    assert found["override"] == "training.recompute=true optimizer=adamw_8bit"
    assert Suggestions(planner, WORDS).together(now, two[:1]) is None
