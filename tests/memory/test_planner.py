"""Values of `auto`: fewest recomputed layers that fit, fastest bins, ddp or fsdp."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.config.load import compose_run
from app.memory.estimate import Estimate, Verdict, check_fit, planned_choices
from app.memory.planner import Planned, Planner, best_budget, describe_bins, fastest_bins, fewest_recomputed
from app.memory.trace import Shape, worst_case
from app.training.auto_settings import bin_sizes, step_tokens
from tests.memory.facts import GPU, plan
from tests.memory.truth import small_run

LAYERS = 3
LARGE = Shape(1, 4096, (1024,) * 4, 6, 2048, 4096)
RUN = small_run(f"model.architecture.num_hidden_layers={LAYERS}", "recipe=lora", "precision=bf16", "compile=none")
CHOICES = planned_choices(RUN, "gpu")
BIN_SIZES = [2048, 1024, 512, 256, 128]
BINS = small_run(
    "model.architecture.num_hidden_layers=4",
    *("recipe=lora", "precision=bf16", "training.recompute=auto", "compile=none"),
    *("batching.tokens=auto", "batching.accumulation=8", "dataset.max_length=128"),
)


def handmade(count: int, needed: float, memory: float, seconds: float = 1.0, persistent: int = 0) -> Planned:
    verdict = Verdict(round(needed), 0, 0, 0, round(memory), persistent)
    run = replace(RUN, training=replace(RUN.training, recompute=count))
    return Planned(run, worst_case(RUN), plan(), verdict, seconds, 32, chosen=True)


def test_planner_finds_fewest_recomputed_layers() -> None:
    """Each recomputed layer saves memory, except the first, which adds its activations in backward, and the last."""
    estimate = Estimate(RUN, LARGE, "gpu", CHOICES)
    no_margin = replace(GPU, memory_bytes=0)
    needed = [check_fit(estimate.planned(count), no_margin).needed_bytes for count in range(LAYERS + 1)]
    _, *rest, _ = needed
    assert sorted(rest, reverse=True) == rest
    assert len(set(rest)) > LAYERS // 2
    run = replace(RUN, training=replace(RUN.training, recompute="auto"))
    memory = round(needed[2] / 0.97) + 1  # 3 % are margin
    found = Planner(replace(GPU, memory_bytes=memory)).of_batch(run, LARGE)
    first = next(n for n, size in enumerate(needed) if size + round(0.03 * memory) <= memory)
    assert (found.recomputed, found.verdict.fits, found.chosen) == (first, True, True)


@pytest.mark.parametrize("enough", range(0, 34, 3))
def test_fewest_recomputed_makes_few_plans(enough: int) -> None:
    asked: list[int] = []

    def at(count: int) -> Planned:
        asked.append(count)
        return handmade(count, 0 if count >= enough else 2, 1)

    found = fewest_recomputed(32, at)
    assert (found.recomputed, found.verdict.fits) == (min(enough, 32), enough <= 32)
    assert len(asked) <= 7


@pytest.mark.parametrize(("persistent", "expected"), [(0, [0, 32, 31]), (2, [0, 32])])
def test_fewest_recomputed_of_hopeless_plan_stops_early(persistent: int, expected: list[int]) -> None:
    asked: list[int] = []

    def at(count: int) -> Planned:
        asked.append(count)
        return handmade(count, 2, 1, persistent=persistent)

    found = fewest_recomputed(32, at)
    assert (found.recomputed, found.verdict.fits, asked) == (32, False, expected)


# by budget, the needed memory and the time with no recomputed layer, and the time with as few as fit into 10
POINTS = {0.6: (20, 100, 140), 0.4: (14, 110, 125), 0.3: (12, 120, 130), 0.2: (15, 120, 121)}


@pytest.mark.parametrize(
    ("memory", "points", "expected"),
    [
        (20, POINTS, (0.6, 100)),  # fits
        (14, POINTS, (0.4, 110)),
        (10, POINTS, (0.4, 125)),  # of 0.2, 0.4 needs less memory and time
        (10, POINTS | {0.6: (20, 100, 105)}, (0.6, 105)),
        (10, POINTS | {0.3: (12, 115, 120)}, (0.3, 120)),
    ],
)
def test_best_budget_recomputes_least_of_those_that_fit(
    memory: int, points: dict[float, tuple[int, int, int]], expected: tuple[float, int]
) -> None:
    def point(budget: float, *, fits: bool) -> Planned:
        needed, least, fewest = points[budget]
        made = handmade(
            0, min(needed, memory) if fits else needed, memory, least if needed <= memory or not fits else fewest
        )
        return replace(
            made,
            run=replace(RUN, compile=replace(RUN.compile, memory_budget=budget)),
            plan=replace(made.plan, peak_bytes=needed),
        )

    found = best_budget(list(points), lambda each: point(each, fits=False), lambda each: point(each, fits=True))
    assert (found.run.compile.memory_budget, found.seconds) == expected


def test_layers_that_differ_are_planned_at_most_twice() -> None:
    asked: list[int] = []

    def at(count: int) -> Planned:
        asked.append(count)
        return handmade(count, 0 if count >= 5 else 2, 1)

    found = fewest_recomputed(32, at, alike=False)
    assert (found.recomputed, found.verdict.fits, asked) == (32, True, [0, 32])


def plan_with_bins(tokens: int, memory: float) -> Planned:
    """Handmade plan that peaks in the head or in backward, growing with tokens and stored layers."""

    def at(count: int) -> Planned:
        head = 1e6 + 1000 * tokens * (40 - count)
        backward = 2e6 + 9000 * tokens + 500 * tokens * (32 - count)
        return handmade(count, max(head, backward), memory, 100 + count)

    return fewest_recomputed(32, at)


@given(st.floats(1e6, 3e8))
def test_fastest_bins_has_least_time_of_all_that_fit(memory: float) -> None:
    def seconds(found: Planned, tokens: int) -> float:
        return found.seconds * (1 + 256 / tokens)

    every = [(plan_with_bins(tokens, memory), tokens) for tokens in BIN_SIZES]
    asked: list[int] = []

    def at(tokens: int) -> Planned:
        asked.append(tokens)
        return plan_with_bins(tokens, memory)

    found = fastest_bins(BIN_SIZES, at)
    fitting = [seconds(each, tokens) for each, tokens in every if each.verdict.fits]
    if every[0][0].verdict.fits and not every[0][0].recomputed:
        assert asked == BIN_SIZES[:1], "smaller ones cannot be faster"
    assert found.verdict.fits == bool(fitting)
    if fitting:
        assert min(seconds(found, tokens) for tokens in asked) <= min(fitting)
    else:
        assert found == every[-1][0], "the smallest bins"


def test_planner_resolves_bins_on_gpu_and_processor() -> None:
    assert bin_sizes(BINS) == BIN_SIZES
    assert step_tokens(BINS) == 2048
    found = Planner(GPU).at(BINS)
    assert (found.run.batching.bin_tokens, found.run.batching.accumulation) == (2048, 1), "the largest bins fit"
    assert (found.chosen, found.chosen_bins, found.recomputed) == (True, True, 0)
    cpu = replace(GPU, device="cpu", memory_bytes=1 << 40)
    here = Planner(cpu).at(replace(BINS, training=replace(BINS.training, recompute=0)))
    assert (here.run.batching.bin_tokens, here.recomputed) == (BINS.model.suggest.tokens, 0) == (256, 0)
    assert "larger ones do not pay on a CPU" in describe_bins(here, 8, cpu)


def test_planner_of_too_small_machine_uses_smallest_bins() -> None:
    tiny: Any = replace(GPU, memory_bytes=1 << 20, context_bytes=0)
    found = Planner(tiny).at(BINS)
    assert (found.run.batching.bin_tokens, found.recomputed, found.verdict.fits) == (128, 4, False)
    assert "does not fit even so" in describe_bins(found, 16, tiny)


def test_parallel_auto_shards_a_model_that_does_not_fit_whole() -> None:
    run = small_run("recipe=full", "training.recompute=0")
    fits = Planner(GPU, processes=4).at(run)
    assert (fits.run.parallel.kind, fits.verdict.fits) == ("ddp", True)
    least = fits.verdict.reserved_bytes + fits.verdict.context_bytes  # one margin too little
    found = Planner(replace(GPU, memory_bytes=least), processes=4).at(run)
    assert (found.run.parallel.kind, found.verdict.fits) == ("fsdp", True)
    assert found.parallel_reason.startswith("fsdp, because ddp needs 0.")
    assert Planner(GPU).at(run).run.parallel.kind == "auto"


def test_plan_of_ddp_keeps_gradients_between_steps() -> None:
    run = small_run("recipe=full", "training.recompute=0", "parallel=ddp", "batching.accumulation=1")
    alone, shared = (Planner(GPU, processes=count).at(run).plan for count in (1, 2))
    assert shared.anatomy["gradients"] == shared.anatomy["trained_weights"] > alone.anatomy["gradients"]
    assert shared.flops == alone.flops


def test_presets_have_equal_tokens_per_step() -> None:
    small, large = (
        compose_run([f"experiment=llama_70b_{name}", "dataset=messages", "dataset.path=none.jsonl"])
        for name in ("small", "16k")
    )
    tokens = [run.batching.tokens * run.batching.accumulation for run in (small, large)]
    assert tokens == [16384, 16384]
    assert small.adapter == large.adapter
    assert small.optimizer == large.optimizer
