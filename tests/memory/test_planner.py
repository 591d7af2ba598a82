"""Values of `auto`, suggestions that save memory, and predicted against measured memory."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.batch import Batch
from app.config.schema import RunConfig
from app.distributed.launch import World
from app.distributed.process_group import HostGroup, Runtime
from app.memory.estimate import Estimate, Verdict, check_fit, planned_choices, seconds_per_token
from app.memory.planner import (
    LEARNING,
    NUMBERS,
    SPEED,
    Candidate,
    LocalPlanner,
    Planned,
    Planner,
    Suggestion,
    Suggestions,
    best_budget,
    candidates,
    describe_bins,
    fastest_bins,
    fewest_recomputed,
)
from app.memory.trace import Shape, worst_case
from app.model.build import build_training_model, choose_loss_head
from app.tasks.table import loss_of
from app.training.auto_settings import Choices, bin_sizes, sections_of, step_tokens, with_tile
from app.training.memory import Forecast, Measured, Predicted
from app.training.setup import stepper_of
from app.training.train_step import Stepper
from tests.harness.composed import composed
from tests.memory.facts import GPU, MIB, plan
from tests.memory.truth import EXPERTS, ONE_LAYER, PACKED, batch_of, small_run

LAYERS = 3
LARGE = Shape(1, 4096, (1024,) * 4, 6, 2048, 4096)
RUN = small_run(f"model.architecture.num_hidden_layers={LAYERS}", "recipe=full", "precision=bf16", "compile=none")
CHOICES = planned_choices(RUN, "gpu")
BIN_SIZES = [2048, 1024, 512, 256, 128]
BINS = small_run(
    "model.architecture.num_hidden_layers=2",
    *("recipe=full", "precision=bf16", "training.recompute=auto", "compile=none"),
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


def test_planner_tiles_mlps_only_if_recomputing_all_layers_does_not_fit() -> None:
    words = ("batching.tokens=4096", "precision=bf16", "compile=none")
    run = small_run("recipe=lora", "model.architecture.intermediate_size=2048", *words)
    run = replace(run, training=replace(run.training, recompute="auto", tile="auto"))
    no_margin = replace(GPU, memory_bytes=0)
    least = [
        check_fit(Estimate(with_tile(run, tile), LARGE, "gpu", CHOICES).planned(True), no_margin).needed_bytes
        for tile in (2048, 0)
    ]
    assert least[0] < 0.8 * least[1]
    for needed, expected in zip(least, (2048, 0), strict=True):
        memory = round(needed / 0.97) + 1
        found = Planner(replace(GPU, memory_bytes=memory)).of_batch(run, LARGE)
        assert (found.verdict.fits, found.run.training.tile, found.chosen_tile) == (True, expected, True)


def test_planner_leaves_mlps_of_experts_whole() -> None:
    run = small_run("recipe=lora", *EXPERTS, ONE_LAYER, "training.recompute=true", "batching.tokens=4096")
    found = Planner(replace(GPU, memory_bytes=80 * MIB)).of_batch(run, LARGE)
    assert (found.verdict.fits, found.verdict.is_hopeless, found.run.training.tile) == (False, False, 0)


def test_planner_before_ampere_plans_fp16_sdpa_and_uncompiled_layers() -> None:
    run = small_run("model.architecture.num_hidden_layers=2", "recipe=lora", "compile=auto", "training.recompute=0")
    run = replace(run, precision=replace(run.precision, kind="auto"), attention=replace(run.attention, kind="auto"))
    assert planned_choices(run, "gpu", before_ampere=True) == Choices("fp16", "sdpa")
    uncompiled = Planner(GPU).at(replace(run, compile=replace(run.compile, kind="none")))
    older = Planner(replace(GPU, before_ampere=True)).at(run)
    assert older.run.compile.kind == "none"
    head = older.plan.largest["loss_head"] - uncompiled.plan.largest["loss_head"]
    assert head > 0, "plain arithmetic in place of the kernel"


def test_host_memory_counts_where_the_gpu_shares_it() -> None:
    paged = replace(plan(), host_bytes=5 * MIB, offloaded_bytes=3 * MIB)
    shared = check_fit(paged, replace(GPU, shares_host=True))
    assert shared.needed_bytes == check_fit(paged, GPU).needed_bytes + 8 * MIB


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
    assert found.run.parallel.kind == "auto", "of one process"
    cpu = replace(GPU, device="cpu", memory_bytes=1 << 40)
    here = Planner(cpu).at(replace(BINS, training=replace(BINS.training, recompute=0)))
    assert (here.run.batching.bin_tokens, here.recomputed) == (BINS.model.suggest.tokens, 0) == (256, 0)
    assert "larger bins are no faster on a CPU" in describe_bins(here, 8, cpu)


def test_planner_of_too_small_machine_uses_smallest_bins() -> None:
    tiny: Any = replace(GPU, memory_bytes=1 << 20, context_bytes=0)
    found = Planner(tiny).at(BINS)
    assert (found.run.batching.bin_tokens, found.recomputed, found.verdict.fits) == (128, 2, False)
    assert "still does not fit" in describe_bins(found, 16, tiny)


def test_parallel_auto_shards_a_model_that_does_not_fit_whole() -> None:
    run = small_run("recipe=full", "training.recompute=0", "compile=none")
    fits = Planner(GPU, processes=4).at(run)
    assert (fits.run.parallel.kind, fits.verdict.fits) == ("ddp", True)
    least = fits.verdict.reserved_bytes + fits.verdict.context_bytes  # one margin too little
    found = Planner(replace(GPU, memory_bytes=least), processes=4).at(run)
    assert (found.run.parallel.kind, found.verdict.fits) == ("fsdp", True)
    assert found.parallel_reason.startswith("fsdp, because ddp needs 0.")


def test_plan_of_ddp_keeps_gradients_between_steps() -> None:
    words = ("training.recompute=0", "parallel=ddp", "batching.accumulation=1", "compile=none")
    run = small_run("recipe=full", *words, ONE_LAYER)
    alone, shared = (Planner(GPU, processes=count).at(run).plan for count in (1, 2))
    assert shared.anatomy["gradients"] == shared.anatomy["trained_weights"] > alone.anatomy["gradients"]
    assert shared.flops == alone.flops


def test_presets_have_equal_tokens_per_step() -> None:
    small, large = (
        composed(f"experiment=llama_70b_{name}", "dataset=messages", "dataset.path=none.jsonl")
        for name in ("small", "16k")
    )
    tokens = [run.batching.tokens * run.batching.accumulation for run in (small, large)]
    assert tokens == [16384, 16384]
    assert small.adapter == large.adapter
    assert small.optimizer == large.optimizer


def run_of(words: Sequence[str], chosen: Sequence[Candidate]) -> RunConfig | None:
    return Suggestions(Planner(GPU), words).run(chosen)


def costs_of_candidates(*words: str) -> dict[str, int]:
    return {" ".join(each.overrides): each.costs for each in candidates(composed(*words))}


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            ["model=llama"],
            {
                "training.offload=true": SPEED,
                "batching.tokens=2048 batching.accumulation=2": SPEED,
                "optimizer=paged_adamw_8bit": NUMBERS,
                "recipe=qlora": NUMBERS,
                "adapter.r=8": LEARNING,
            },
        ),
        (
            ["model=llama", "quantization=fp8", "training.recompute=true", "batching.tokens=2048", "adapter.r=8"],
            {
                "training.offload=true": SPEED,
                "optimizer=paged_adamw_8bit": NUMBERS,
                "quantization=nf4": NUMBERS,
                "dataset.max_length=1024 batching.tokens=1024": LEARNING,
            },
        ),
        (
            ["model=llama", "recipe=full", "training.recompute=false", "batching.tokens=2048"],
            {
                "training.recompute=true": SPEED,
                "optimizer=adamw_8bit": NUMBERS,
                "optimizer=paged_adamw_8bit": NUMBERS,
                "precision=bf16 precision.trained=bf16": NUMBERS,
                "optimizer.in_backward=true training.clip=0": LEARNING,
                "recipe=lora": LEARNING,
                "recipe=qlora": LEARNING,
                "dataset.max_length=1024 batching.tokens=1024": LEARNING,
            },
        ),
        (
            ["model=llama", "recipe=qlora", "batching.packing=false", "batching.rows=5", "training.recompute=7"],
            {
                "training.recompute=true": SPEED,
                "batching.rows=2 batching.accumulation=3": SPEED,
                "dataset.max_length=1024": LEARNING,
                "adapter.r=8": LEARNING,
            },
        ),
        (
            ["model=llama", "recipe=qlora", "quantization.double_quant=false", "batching.tokens=2048",
             "dataset.max_length=400", "adapter.r=8"],
            {"training.offload=true": SPEED, "batching.tokens=1024 batching.accumulation=2": SPEED,
             "quantization.double_quant=true": NUMBERS},
        ),
    ],
)  # fmt: skip
def test_candidates_all_change_the_run(words: list[str], wanted: dict[str, int]) -> None:
    assert costs_of_candidates(*words) == wanted
    run = composed(*words)
    for candidate in candidates(run):
        other = run_of(words, [candidate])
        assert other is not None, candidate
        assert other != run, candidate


def test_smaller_micro_batches_tell_whether_a_step_grows() -> None:
    told = {
        rows: next(each.why for each in candidates(composed(*words)) if "batching.accumulation" in each.overrides[-1])
        for rows in (4, 5)
        for words in [["model=llama", "batching.packing=false", f"batching.rows={rows}"]]
    }
    assert "as many tokens" in told[4]
    assert "20% more tokens" in told[5]


def test_candidate_replaces_override_of_command_line() -> None:
    words = ["model=llama", "recipe=full", "batching.tokens=4096", "batching.accumulation=3"]
    chosen = [
        Candidate(("recipe=lora",), LEARNING, ""),
        Candidate(("batching.tokens=2048", "batching.accumulation=6"), SPEED, ""),
    ]
    run = run_of(words, chosen)
    assert run is not None
    assert (run.adapter.kind, run.batching.tokens, run.batching.accumulation) == ("lora", 2048, 6)
    assert run_of(words, [Candidate(("adapter=none", "quantization=nf4"), SPEED, "")]) is None


def test_seconds_per_token_add_dequantization_to_compute() -> None:
    run = composed("model=llama", "recipe=qlora", "batching.accumulation=2")
    weights = 63 * 100 * MIB
    given = plan(quantization_constants=100, flops=3e15, recomputed_flops=5e5)
    seconds = seconds_per_token(run, given, 1000, GPU) * 1000 * 2
    assert seconds == pytest.approx(3e15 / 1e12 + 2 * 3 * weights * 2.5 / 1e11)  # 2 micro-batches, 3 uses in each
    twice = seconds_per_token(run, replace(given, recomputed_flops=0.0), 1000, GPU) * 1000 * 2
    assert twice == pytest.approx(3e15 / 1e12 + 2 * 2 * weights * 2.5 / 1e11)
    assert seconds_per_token(run, given, 1000, replace(GPU, bytes_per_second=None)) == pytest.approx(3e15 / 1e12 / 2000)


# ---- with handmade plans


def suggestions_of(
    monkeypatch: pytest.MonkeyPatch, saved: dict[str, tuple[int, int]], *overrides: str, alone: str = ""
) -> tuple[Suggestions, list[Suggestion], list[list[str]]]:
    """Suggestions from saved bytes and costs by override; `alone` fits by itself. Savings of a combination add up."""
    asked: list[list[str]] = []

    def plan_combination(_self: Suggestions, now: Any, chosen: Sequence[Candidate]) -> Any:
        words = [override for each in chosen for override in each.overrides]
        asked.append(words)
        needed = now.verdict.needed_bytes - sum(saved[word][0] for word in words)
        return SimpleNamespace(verdict=SimpleNamespace(needed_bytes=needed, fits=needed <= 1000))

    monkeypatch.setattr(Suggestions, "plan", plan_combination)
    found = [
        Suggestion(Candidate((word,), costs, ""), saves, 0.0, fits=word == alone)
        for word, (saves, costs) in saved.items()
    ]
    return Suggestions(Planner(GPU), overrides), found, asked


def too_large_by(count: int) -> Any:
    return SimpleNamespace(chosen_bins=False, verdict=SimpleNamespace(needed_bytes=1000 + count, memory_bytes=1000))


def test_together_adds_cheapest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Combinations that cannot save enough are not planned; suggestions that save almost nothing come last."""
    saved = {"seed=1": (4, SPEED), "eval.rows=2": (300, SPEED), "training.clip=2": (200, NUMBERS)}
    suggestions, found, asked = suggestions_of(monkeypatch, saved)
    both = suggestions.together(too_large_by(500), found)
    assert both == {"override": "eval.rows=2 training.clip=2", "needed_bytes": 1000}
    assert len(asked) == 1
    three = suggestions.together(too_large_by(502), found)
    assert three is not None
    assert three["override"] == "eval.rows=2 training.clip=2 seed=1"
    assert suggestions.together(too_large_by(505), found) is None


def test_together_combines_only_what_costs_less_than_one_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {
        "recipe=qlora": (900, LEARNING),
        "optimizer=sgd": (9, NUMBERS),
        "eval.rows=2": (9, NUMBERS),
        "seed=1": (9, SPEED),
    }
    suggestions, found, asked = suggestions_of(monkeypatch, saved, "recipe=full", alone="recipe=qlora")
    assert suggestions.together(too_large_by(500), found) is None
    assert asked == [["optimizer=sgd", "eval.rows=2", "seed=1"]], "no suggestion that changes the training result"


def test_compatible_picks_first_of_same_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def words(*saved: tuple[str, int]) -> list[str]:
        given = {word: (saves, NUMBERS) for word, saves in saved}
        suggestions, found, _ = suggestions_of(monkeypatch, given, "recipe=full")
        return [" ".join(each.candidate.overrides) for each in suggestions.compatible(found)]

    paged, narrow = ("optimizer=paged_adamw_8bit", 5), ("optimizer=adamw_8bit", 4)
    shorter = ("training.max_steps=3", 1)
    assert words(paged, narrow, shorter) == [paged[0], shorter[0]]
    assert words(("recipe=lora", 8), ("recipe=full", 1)) == ["recipe=lora"]
    with_adapters = ("optimizer.in_backward=true", 1)
    assert words(("recipe=lora", 8), with_adapters) == ["recipe=lora"], "they conflict"


def test_candidates_are_planned_with_resolved_bins_and_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RunConfig] = []
    monkeypatch.setattr(Planner, "at", lambda _self, run: seen.append(run))
    words = ("batching.tokens=auto", "batching.accumulation=8", "training.recompute=true")
    found = composed("batching.tokens=2048", "batching.accumulation=1", "training.tile=64")
    now: Any = SimpleNamespace(chosen_bins=True, chosen_tile=True, parallel_reason="", run=found)
    smaller = Candidate(("batching.tokens=1024", "batching.accumulation=2"), SPEED, "")
    for candidate in (smaller, Candidate(("adapter.r=4",), LEARNING, "")):
        Suggestions(Planner(GPU), words).plan(now, [candidate])
    batching = [(run.batching.tokens, run.batching.accumulation) for run in seen]
    assert batching == [(1024, 2), (2048, 1)]
    assert [run.training.tile for run in seen] == [64, 64]
    assert seen[1].adapter.r == 4


SINGLE_PROCESS = Runtime(None, torch.device("cpu"), HostGroup(0, 1), 1)
PREDICTED_CHOICES = Choices("fp32", "sdpa")
PLANNER = LocalPlanner()


def single_stepper(run: RunConfig) -> Stepper:
    model = build_training_model(
        sections_of(run, PREDICTED_CHOICES), loss_of(run), torch.device("cpu"), run.seed, "nowhere"
    )
    choose_loss_head(model, batch_of(PACKED))
    return stepper_of(model, run, SINGLE_PROCESS, PREDICTED_CHOICES.precision)


def test_measured_step_equals_plain_step_bit_for_bit() -> None:
    run = small_run("recipe=qlora", "adapter.dropout=0.1", "training.recompute=1")
    batches = [batch_of(PACKED)] * 2
    plain, counted = single_stepper(run), single_stepper(run)
    measured = Measured(SINGLE_PROCESS, steps=10)
    for stepper, step in ((plain, plain.run), (counted, None)):
        torch.manual_seed(1)
        for _ in range(3):
            result = step(batches, 1e-2) if step else measured.run(stepper, batches, 1e-2)
        last = float(result.loss_sum), float(result.grad_norm)
        stepper.last = last  # type: ignore[attr-defined]
    assert plain.last == counted.last  # type: ignore[attr-defined]
    for mine, other in zip(plain.model.parameters(), counted.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert measured.bytes is not None


def test_prediction_equals_measured_peak() -> None:
    run = small_run("recipe=lora")
    batch = batch_of(PACKED)
    predicted = PLANNER.predict(run, PREDICTED_CHOICES, batch, 1, "cpu")
    stepper, measured = single_stepper(run), Measured(SINGLE_PROCESS, steps=2)
    measured.run(stepper, [batch], 1e-3)
    assert measured.bytes is None, "the first step starts without optimizer states"
    measured.run(stepper, [batch], 1e-3)
    assert measured.bytes is not None
    assert abs(predicted.bytes - measured.bytes) <= 4096
    assert predicted.where in Forecast.estimate(lambda *_: predicted, run, PREDICTED_CHOICES, batch, 1, "cpu").text


def test_measured_run_of_one_step_has_peak() -> None:
    stepper, measured = single_stepper(small_run("recipe=lora")), Measured(SINGLE_PROCESS, steps=1)
    measured.run(stepper, [batch_of(PACKED)], 1e-3)
    assert measured.bytes is not None


def test_failed_prediction_is_one_line() -> None:
    def fails(*_args: object) -> Predicted:
        raise ValueError("no such shape\nand more")

    batch: Batch = batch_of(PACKED)
    forecast = Forecast.estimate(fails, small_run(), PREDICTED_CHOICES, batch, 1, "cpu")
    assert forecast.predicted is None
    assert forecast.rows() == [("memory", "no estimate for this model (ValueError: no such shape)")]
    assert forecast.facts() == {}


def test_prediction_of_sharded_run_has_share_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("recipe=full", "parallel=fsdp", ONE_LAYER)
    run, batch = small_run(*words, "training.recompute=0"), batch_of(PACKED)
    alone = PLANNER.predict(run, PREDICTED_CHOICES, batch, 1, "cpu")
    monkeypatch.setattr("app.memory.planner.world", lambda: World(0, 4, 0, 4))
    shared = PLANNER.predict(run, PREDICTED_CHOICES, batch, 1, "cpu")
    assert shared.anatomy["trained_weights"] == pytest.approx(alone.anatomy["trained_weights"] / 4, rel=0.02)
    auto = small_run(*words, "training.recompute=auto")
    (layers, *_), remark = PLANNER.recompute(auto, PREDICTED_CHOICES, batch, 1, 1)
    assert layers == 0
    assert remark.startswith("training.recompute=auto: 0 of 1 layers, which needs")


def test_predict_leaves_rng_state_unchanged() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    run = small_run("recipe=lora", "adapter.dropout=0.1", ONE_LAYER)
    PLANNER.predict(run, PREDICTED_CHOICES, batch_of(PACKED), 1, "cpu")
    assert torch.equal(before, torch.get_rng_state())
