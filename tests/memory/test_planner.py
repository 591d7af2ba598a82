"""What `auto` comes to: as few recomputed layers as fit, and of all bins that fit the fastest."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.memory.estimate import Estimate, planned_choices
from app.memory.fit import Verdict, judge
from app.memory.planner import Planned, Planner, bins_in_words, fastest, fewest
from app.memory.shape import Shape, worst_case
from app.training.auto_batch import bin_sizes, step_tokens
from tests.memory.facts import GPU, plan
from tests.memory.truth import small_run

LAYERS = 7
LARGE = Shape(1, 4096, (1024,) * 4, 6, 2048, 4096)
RUN = small_run(f"model.architecture.num_hidden_layers={LAYERS}", "recipe=lora", "precision=bf16")
CHOICES = planned_choices(RUN.precision, "gpu")
RUNGS = [2048, 1024, 512, 256, 128]
BINS = small_run(
    "model.architecture.num_hidden_layers=6",
    *("recipe=lora", "precision=bf16", "training.recompute=auto"),
    *("batching.tokens=auto", "batching.accumulation=8", "dataset.max_length=128"),
)


def made(count: int, needed: float, memory: float, seconds: float = 1.0, kept: int = 0) -> Planned:
    """By hand."""
    verdict = Verdict(round(needed), 0, 0, 0, 0, round(memory), kept)
    run = replace(RUN, training=replace(RUN.training, recompute=count))
    return Planned(run, worst_case(RUN), plan(), verdict, seconds, 32, chosen=True)


def test_each_layer_more_saves_memory_and_the_first_that_fits_is_found() -> None:
    """The first one may not: what it computes again comes on top. Nor the last, which is computed again at once."""
    estimate = Estimate(RUN, LARGE, "gpu", CHOICES)
    none = replace(GPU, memory_bytes=0)  # no margin either
    needed = [judge(estimate.planned(count), none).needed_bytes for count in range(LAYERS + 1)]
    _, *rest, _ = needed
    assert sorted(rest, reverse=True) == rest
    assert len(set(rest)) > LAYERS // 2
    run = replace(RUN, training=replace(RUN.training, recompute="auto"))
    memory = round(needed[3] / 0.97) + 1  # three per cent are the margin
    found = Planner(replace(GPU, memory_bytes=memory)).of_batch(run, LARGE)
    first = next(n for n, size in enumerate(needed) if size + round(0.03 * memory) <= memory)
    assert (found.recomputed, found.verdict.fits, found.chosen) == (first, True, True)


@pytest.mark.parametrize("enough", range(0, 34, 3))
def test_few_plans_are_asked_for(enough: int) -> None:
    asked: list[int] = []

    def at(count: int) -> Planned:
        asked.append(count)
        return made(count, 0 if count >= enough else 2, 1)

    found = fewest(32, at)
    assert (found.recomputed, found.verdict.fits) == (min(enough, 32), enough <= 32)
    assert len(asked) <= 7


@pytest.mark.parametrize(("kept", "expected"), [(0, [0, 32, 31]), (2, [0, 32])])
def test_weights_and_states_that_are_too_much_alone_decide_at_once(kept: int, expected: list[int]) -> None:
    asked: list[int] = []

    def at(count: int) -> Planned:
        asked.append(count)
        return made(count, 2, 1, kept=kept)

    found = fewest(32, at)
    assert (found.recomputed, found.verdict.fits, asked) == (32, False, expected)


def of_bins(tokens: int, memory: float) -> Planned:
    """A part that grows with the tokens and with the layers that keep all, peaks in two places."""

    def at(count: int) -> Planned:
        head = 1e6 + 1000 * tokens * (40 - count)
        backward = 2e6 + 9000 * tokens + 500 * tokens * (32 - count)
        return made(count, max(head, backward), memory, 100 + count)

    return fewest(32, at)


@given(st.floats(1e6, 3e8))
def test_nothing_that_fits_is_faster(memory: float) -> None:
    def seconds(found: Planned, tokens: int) -> float:
        return found.seconds * (1 + 256 / tokens)

    every = [(of_bins(tokens, memory), tokens) for tokens in RUNGS]
    asked: list[int] = []

    def at(tokens: int) -> Planned:
        asked.append(tokens)
        return of_bins(tokens, memory)

    found = fastest(RUNGS, at)
    fitting = [seconds(each, tokens) for each, tokens in every if each.verdict.fits]
    assert found.verdict.fits == bool(fitting)
    if fitting:
        assert min(seconds(found, tokens) for tokens in asked) <= min(fitting)
    else:
        assert found == every[-1][0], "what needs least"


def test_where_there_is_room_nothing_else_is_planned() -> None:
    asked: list[int] = []

    def at(tokens: int) -> Planned:
        asked.append(tokens)
        return of_bins(tokens, 1e10)

    assert not fastest(RUNGS, at).recomputed
    assert asked == [2048]


def test_bins_and_layers_are_found_on_a_gpu_and_on_a_processor() -> None:
    assert bin_sizes(BINS) == RUNGS
    assert step_tokens(BINS) == 2048
    found = Planner(GPU).at(BINS)
    assert (found.run.batching.bin_tokens, found.run.batching.accumulation) == (2048, 1), "there is room"
    assert (found.chosen, found.chosen_bins, found.recomputed) == (True, True, 0)
    assert found.bins == ["batching.tokens=2048", "batching.accumulation=1"]
    cpu = replace(GPU, device="cpu", memory_bytes=1 << 40)
    here = Planner(cpu).at(replace(BINS, training=replace(BINS.training, recompute=0)))
    assert (here.run.batching.bin_tokens, here.recomputed) == (BINS.model.suggest.tokens, 0) == (256, 0)
    assert "larger ones do not pay on a processor" in bins_in_words(here, 8, cpu)


def test_where_nothing_fits_it_is_what_needs_least() -> None:
    little: Any = replace(GPU, memory_bytes=1 << 20, context_bytes=0)
    found = Planner(little).at(BINS)
    assert (found.run.batching.bin_tokens, found.recomputed, found.verdict.fits) == (128, 6, False)
    assert "does not fit even so" in bins_in_words(found, 16, little)


def test_parallel_auto_shards_a_model_that_does_not_fit_whole() -> None:
    run = small_run("recipe=full", "training.recompute=0")
    fits = Planner(GPU, processes=4).at(run)
    assert (fits.run.parallel.kind, fits.verdict.fits) == ("ddp", True)
    least = fits.verdict.reserved_bytes + fits.verdict.context_bytes  # without a margin
    found = Planner(replace(GPU, memory_bytes=least), processes=4).at(run)
    assert (found.run.parallel.kind, found.verdict.fits) == ("fsdp", True)
    assert found.chosen_parallel.startswith("fsdp, because ddp needs 0.")
    assert Planner(GPU).at(run).run.parallel.kind == "auto"
