"""training.recompute=auto: as few layers as fit, and no fewer."""

from dataclasses import replace
from functools import cache

import pytest

from app.plan.depth import Depths
from app.plan.fewest import fewest, fewest_on, judged
from app.plan.planner import depths_of, planned_choices
from app.plan.verdict import Verdict
from tests.plan.facts import GPU
from tests.plan.test_depth import LARGE  # a layer more is more than the pages of an allocator
from tests.plan.truth import small_run

LAYERS = 9
RUN = small_run("model.architecture.num_hidden_layers=9", "recipe=lora", "precision=bf16")
CHOICES = planned_choices(RUN.precision, "gpu")


@cache
def depths() -> Depths:
    return depths_of(RUN, LARGE, "gpu", CHOICES)


@cache
def needed() -> list[int]:
    """Bytes with 0 to all layers recomputed, the margin of no memory at all among them."""
    none = replace(GPU, memory_bytes=0)
    return [judged(depths().planned(count), none, 1).needed_bytes for count in range(LAYERS + 1)]


def test_each_layer_more_saves_memory() -> None:
    """The first one may not: what it computes again comes on top. Nor the last, which is computed again at once."""
    _, *rest, _ = needed()
    assert sorted(rest, reverse=True) == rest
    assert len(set(rest)) > LAYERS // 2


@pytest.mark.parametrize("wanted", range(LAYERS + 1))
def test_the_first_that_fits(wanted: int) -> None:
    memory = round(needed()[wanted] / 0.97) + 1  # three per cent are the margin
    machine = replace(GPU, memory_bytes=memory)
    count, verdict = fewest(LAYERS, lambda tried: judged(depths().planned(tried), machine, 1))
    assert verdict.fits
    if wanted == LAYERS // 2:
        assert (count, verdict) == fewest_on(machine, RUN, CHOICES, LARGE, LAYERS, 1)
    assert count == next(n for n, size in enumerate(needed()) if size + round(0.03 * memory) <= memory)


def test_all_of_them_where_nothing_fits() -> None:
    machine = replace(GPU, memory_bytes=min(needed()) // 2)
    count, verdict = fewest_on(machine, RUN, CHOICES, LARGE, LAYERS, 1)
    assert (count, verdict.fits) == (LAYERS, False)


@pytest.mark.parametrize("enough", range(34))
def test_few_plans_are_asked_for(enough: int) -> None:
    asked: list[int] = []

    def at(count: int) -> Verdict:
        asked.append(count)
        return Verdict(0 if count >= enough else 2, 0, 0, 0, 0, 1)

    count, verdict = fewest(32, at)
    assert (count, verdict.fits) == (min(enough, 32), enough <= 32)
    assert len(asked) <= 7
    assert fewest(32, at, doubtful=True) == (count, verdict)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_what_is_kept_anyway_decides_at_once(kept: int) -> None:
    asked: list[int] = []

    def at(count: int) -> Verdict:
        asked.append(count)
        return Verdict(2, 0, 0, 0, 0, 1, kept)

    count, verdict = fewest(32, at)
    assert (count, verdict.fits) == (32, False)
    assert asked == ([0, 32] if kept > 1 else [0, 32, 31])
    asked.clear()
    assert fewest(32, at, doubtful=True) == (count, verdict)
    assert asked == ([32] if kept > 1 else [32, 0, 32, 31])


@pytest.mark.parametrize(
    "words",
    [("recipe=full",), ("recipe=full", "optimizer.in_backward=true", "training.clip=0"), ("recipe=qlora",)],
)
def test_what_is_kept_is_the_same_of_all_and_in_every_peak(words: tuple[str, ...]) -> None:
    """So where it alone is too much, no number of layers fits, nor bins of any size."""
    run = small_run("model.architecture.num_hidden_layers=9", "precision=bf16", *words)
    of_bins = [
        depths_of(run, replace(LARGE, micro_batches=parts), "gpu", CHOICES, steps_only=True)
        for parts in (1, 2)
    ]
    plans = [depths.planned(count) for depths in of_bins for count in (0, LAYERS)]
    assert len({plan.kept_bytes for plan in plans}) == 1
    assert all(plan.kept_bytes <= plan.peak_bytes for plan in plans)
    assert plans[0].kept_bytes > 0
