"""The presets for 70 billion weights keep what they promise, by the plan."""

from app.config.hardware import all_hardware
from app.config.load import compose_run
from app.memory.fit import machine_of
from app.memory.planner import Planned, Planner, by_facts


def planned(experiment: str, hardware: str) -> Planned:
    words = [f"experiment={experiment}", "dataset=messages", "dataset.path=none.jsonl"]
    (card,) = (each for each in all_hardware() if each.name == hardware)
    return Planner(machine_of(card)).at(by_facts(compose_run(words), words))


def test_the_small_one_needs_less_than_48_gb_and_fits_such_a_card() -> None:
    found = planned("llama_70b_small", "a6000")
    assert found.plan.peak_bytes < 45e9
    assert found.plan.offloaded_bytes > 2e9
    assert found.verdict.reserved_bytes < 48e9
    assert found.verdict.fits


def test_both_learn_from_as_many_tokens_a_step() -> None:
    small, large = (
        compose_run([f"experiment=llama_70b_{name}", "dataset=messages", "dataset.path=none.jsonl"])
        for name in ("small", "16k")
    )
    tokens = [run.batching.tokens * run.batching.accumulation for run in (small, large)]
    assert tokens == [16384, 16384]
    assert small.adapter == large.adapter
    assert small.optimizer == large.optimizer
