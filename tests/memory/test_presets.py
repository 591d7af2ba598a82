"""Plans of the presets for models of 70 billion weights."""

from app.config.hardware import all_hardware
from app.config.load import compose_run
from app.memory.fit import machine_of
from app.memory.planner import Planned, Planner, random_if_missing


def planned(experiment: str, hardware: str) -> Planned:
    words = [f"experiment={experiment}", "dataset=messages", "dataset.path=none.jsonl"]
    (card,) = (each for each in all_hardware() if each.name == hardware)
    return Planner(machine_of(card)).at(random_if_missing(compose_run(words), words))


def test_llama_70b_small_fits_card_of_48_gb() -> None:
    small = planned("llama_70b_small", "a6000")
    assert small.plan.peak_bytes < 45e9
    assert small.plan.offloaded_bytes > 2e9
    assert small.verdict.reserved_bytes < 48e9
    assert small.verdict.fits


def test_presets_have_equal_tokens_per_step() -> None:
    small, large = (
        compose_run([f"experiment=llama_70b_{name}", "dataset=messages", "dataset.path=none.jsonl"])
        for name in ("small", "16k")
    )
    tokens = [run.batching.tokens * run.batching.accumulation for run in (small, large)]
    assert tokens == [16384, 16384]
    assert small.adapter == large.adapter
    assert small.optimizer == large.optimizer
