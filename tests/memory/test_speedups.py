"""Faster settings against the plans and bounds of runs that use them."""

from dataclasses import replace

import pytest

from app.memory.check import check_memory, planned_speedups
from app.memory.estimate import Hardware, machine_of
from app.memory.planner import SPEED, Candidate, LocalPlanner, Planner, Suggestions
from app.memory.speedups import bound_seconds, speedups
from app.training.auto_settings import Choices
from tests.harness.composed import composed
from tests.memory.facts import GPU, MIB, gpu, plan
from tests.memory.truth import PACKED, batch_of, small_run

LLAMA = ("model=llama", "model.weights=random", "compile=none")
ONE_ROW = ("recipe=lora", "batching.packing=false", "batching.rows=1", "batching.accumulation=64")
LORA = composed("recipe=lora", "batching.tokens=1000")
QLORA = composed("recipe=qlora", "batching.tokens=1000")


@pytest.mark.parametrize(
    ("words", "hardware", "expected"),
    [
        (("recipe=qlora",), "h100", ["recipe=lora", "batching.tokens=8192"]),
        (("recipe=qlora", "training.recompute=16"), "rtx3090", []),  # nothing to spare
        (("recipe=lora",), "h100", []),  # the bound of larger micro-batches is less than 5 % higher
        (ONE_ROW, "h100", ["batching.rows=4 batching.accumulation=16"]),
    ],
)
def test_speedups_of_real_plans_fit_and_reach_their_bound(
    words: tuple[str, ...], hardware: str, expected: list[str]
) -> None:
    words, planner = (*LLAMA, *words), Planner(machine_of(gpu(hardware)))
    suggestions, now = Suggestions(planner, words), planner.at(composed(*words))
    entries = planned_speedups(suggestions, now, planner.machine)
    assert [entry.text for entry in entries] == expected
    for entry in entries:
        other = suggestions.plan(now, [Candidate(entry.overrides, SPEED, "")])
        assert other is not None
        assert (other.verdict.fits, other.recomputed, entry.factor >= 1.05) == (True, now.recomputed, True)
        assert entry.needed_bytes is not None
        assert other.verdict.needed_bytes <= entry.needed_bytes <= 1.04 * other.verdict.needed_bytes
        before, after = (bound_seconds(p.run, p.plan, p.shape.tokens, planner.machine) for p in (now, other))
        assert entry.factor == pytest.approx(before / after, rel=0.01)


def test_speedup_of_typed_recomputation_is_planned() -> None:
    words = ("model.weights=random", "recipe=full", "compile=none", "batching.tokens=32768")
    run, recomputed = composed(*words, "training.recompute=auto"), "training.recompute=true"
    (entry,) = check_memory(composed(*words, recomputed), (*words, recomputed), gpu("h100"))["faster"]
    assert (entry["override"], entry["bound"] > 1.2) == ("training.recompute=auto", True)
    assert entry["needed_bytes"] == check_memory(run, (), gpu("h100"))["needed_bytes"]


def test_bound_of_a_token_is_compute_and_weights_read() -> None:
    """With 10 tokens, of a GPU of 1e12 FLOP/s and 1e11 bytes/s: 2.5 passes, because half of the forward is repeated."""
    known = plan(frozen_weights=90, trained_weights=10, flops=1e9, forward_flops=4e7, recomputed_flops=2e7)
    assert bound_seconds(LORA, known, 10, GPU) == pytest.approx((1e9 / 1e12 + 2.5 * 100 * MIB / 1e11) / 10)
    packed = plan(frozen_weights=90, quantization_constants=1, flops=1e9)
    read = 90 * MIB + 63 * MIB * (1.5 + 2.5)  # 63 weights per byte of constants
    assert bound_seconds(QLORA, packed, 10, GPU) == pytest.approx((1e9 / 1e12 + 2 * read / 1e11) / 10)


@pytest.mark.parametrize(
    ("peak", "accumulation", "expected"),
    [
        (100, 12, "batching.tokens=12000 batching.accumulation=1"),
        (150, 12, "batching.tokens=6000 batching.accumulation=2"),
        (150, 11, None),  # no divisor fits
        (250, 1, "batching.tokens=2000"),
        (700, 12, None),  # less than a third is free
    ],
)
def test_larger_micro_batch_is_largest_divisor_that_fits(peak: int, accumulation: int, expected: str | None) -> None:
    run = replace(LORA, batching=replace(LORA.batching, accumulation=accumulation))
    known = plan(frozen_weights=30, saved_activations=peak - 30)
    entries = speedups(run, known, 1000, GPU)
    assert [entry.text for entry in entries] == ([] if expected is None else [expected])


def test_no_speedups_without_rates() -> None:
    known = plan(frozen_weights=30, saved_activations=10)
    assert speedups(LORA, known, 1000, GPU)
    cpu = Hardware("cpu", "this machine", "cpu", 1000 * MIB, 0, True)
    assert speedups(LORA, known, 1000, cpu) == []
    fp32 = replace(LORA, precision=replace(LORA.precision, kind="fp32"))
    assert speedups(fp32, known, 1000, GPU) == []


def test_start_of_a_run_on_a_gpu_lists_speedups_without_planning_them(monkeypatch: pytest.MonkeyPatch) -> None:
    run, choices = small_run("recipe=lora", "batching.accumulation=4"), Choices("bf16", "varlen")
    monkeypatch.setattr("app.memory.planner.machine_of", lambda _: machine_of(gpu("h100")))
    predicted = LocalPlanner().predict(run, choices, batch_of(PACKED), 4, "cuda")
    assert [entry["override"] for entry in predicted.faster] == ["batching.tokens=1024 batching.accumulation=1"]

    def fails(_: object) -> Hardware:
        raise RuntimeError("no driver")

    monkeypatch.setattr("app.memory.planner.machine_of", fails)
    unadvised = LocalPlanner().predict(run, choices, batch_of(PACKED), 4, "cuda")
    assert unadvised == replace(predicted, faster=[])
