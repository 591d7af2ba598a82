"""batching.tokens=auto: of all bins and all numbers of recomputed layers that fit, the pair that is fastest."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.bins import ladder, step_tokens
from app.plan import depth
from app.plan.knobs import LEARNING, Knob, candidates
from app.plan.known import Known
from app.plan.largest import Plans, Sized, fastest, largest_on
from app.plan.look import Look
from app.plan.planner import planned_choices
from app.plan.trace import trace
from app.plan.turning import Turning
from app.plan.verdict import judge
from tests.plan.facts import GPU, MIB, plan
from tests.plan.truth import SMALL, small_run

LAYERS = 6
WORDS = (
    "model.architecture.num_hidden_layers=6",
    *("recipe=lora", "precision=bf16", "training.recompute=auto"),
    *("batching.tokens=auto", "batching.accumulation=8", "dataset.max_length=128"),
)
RUN = small_run(*WORDS)
CHOICES = planned_choices(RUN.precision, "gpu")
RUNGS = [2048, 1024, 512, 256, 128]


@cache
def plans() -> Plans:
    return Plans(GPU, RUN, CHOICES, LAYERS, 1, Known())


class Made(Plans):
    """Plans by a formula: a part that grows with the tokens and with the layers that keep all, peaks in two places,
    and an allocator that is on no line.
    """

    def __init__(self, memory: float, odd: float, run: Any = RUN) -> None:
        super().__init__(replace(GPU, memory_bytes=round(memory)), run, CHOICES, 32, 1, Known())
        self.odd = odd
        self.asked: set[tuple[int, int]] = set()

    def traced(self, tokens: int, recomputed: int) -> Sized:
        self.asked.add((tokens, recomputed))
        head = 1e6 + 1000 * tokens * (40 - recomputed)
        backward = 2e6 + 9000 * tokens + 500 * tokens * (32 - recomputed)
        lost = self.odd * 1e5 * -(-tokens // 300)
        made = plan(saved_activations=max(head, backward) / MIB)
        made = replace(made, phases={"head": round(head), "backward": round(backward)})
        verdict = judge(made, self._machine, round(lost))
        return Sized(tokens, recomputed, verdict, (100 + recomputed) * (1 + 256 / tokens), made)


@given(st.floats(1e8, 3e8), st.floats(0, 40), st.sampled_from(["auto", "20"]))
def test_nothing_that_fits_is_faster(memory: float, odd: float, asked: str) -> None:
    run = replace(RUN, training=replace(RUN.training, recompute=asked if asked == "auto" else int(asked)))
    made = Made(memory, odd, run)
    counts = range(33) if asked == "auto" else [20]
    every = [made.traced(tokens, count) for tokens in RUNGS for count in counts]
    made.asked.clear()
    found = fastest(made)
    fitting = [each for each in every if each.verdict.fits]
    assert found.verdict.fits == bool(fitting)
    if fitting:
        assert found.seconds <= min(each.seconds for each in fitting) * 1.05, "a few layers off at most"
    else:
        assert (found.tokens, found.recomputed) == (128, counts[-1])
    sizes = {tokens for tokens, _ in made.asked}
    assert odd > 1 or len(sizes) <= 4, "the ends of the ladder, and what is chosen"


def test_where_there_is_room_nothing_else_is_traced() -> None:
    made = Made(1e10, 0)
    assert (fastest(made).tokens, made.asked) == (2048, {(2048, 0)})


def test_the_ladder_divides_the_step() -> None:
    assert ladder(RUN) == plans().rungs == RUNGS
    assert step_tokens(RUN) == 2048


@pytest.mark.parametrize(("count", "cautious"), [(3, 0.001), (LAYERS, 0.05)])
def test_the_line_through_small_bins_holds(count: int, cautious: float) -> None:
    """Where all layers are recomputed the peak has a place of its own: there the line is above it, never below."""
    line, traced = plans().estimated(1024, count), plans().traced(1024, count)
    peak = max(line.plan.phases.values())
    assert traced.plan.peak_bytes * 0.999 <= peak <= traced.plan.peak_bytes * (1 + cautious)
    assert line.seconds == pytest.approx(traced.seconds, rel=5e-3)


def test_where_nothing_fits_it_is_what_needs_least() -> None:
    found = fastest(Made(1e6, 0))
    assert (found.tokens, found.recomputed, found.verdict.fits) == (128, 32, False)
    assert "does not fit even so" in found.words(RUN, 32, GPU)


def test_where_nothing_can_fit_little_is_traced() -> None:
    class Heavy(Made):
        def traced(self, tokens: int, recomputed: int) -> Sized:
            sized = super().traced(tokens, recomputed)
            return replace(sized, verdict=replace(sized.verdict, kept_bytes=2 * 10**6))

    heavy = Heavy(1e6, 0)
    found = fastest(heavy)
    assert (found.tokens, found.recomputed, found.verdict.fits) == (128, 32, False)
    assert heavy.asked == {(2048, 0), (128, 32)}
    heavy.asked.clear()
    again = fastest(heavy, doubtful=True)
    assert (again.tokens, again.recomputed, again.verdict) == (128, 32, found.verdict)
    assert heavy.asked == {(128, 32)}


@pytest.mark.parametrize("memory", [1e6, 1e8, 1e9, 1e10])
def test_a_doubt_changes_nothing(memory: float) -> None:
    found, other = fastest(Made(memory, 0)), fastest(Made(memory, 0), doubtful=True)
    assert (found.tokens, found.recomputed, found.verdict) == (other.tokens, other.recomputed, other.verdict)


@pytest.mark.parametrize("bins", [("batching.tokens=auto",), ()], ids=["bins-and-layers", "layers"])
def test_after_too_much_a_look_begins_with_what_needs_least(
    bins: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("model.architecture.num_hidden_layers=9", "training.recompute=auto", *bins)
    first, second = small_run("optimizer=adamw", *words), small_run("optimizer=adamw_8bit", *words)
    machine = replace(GPU, memory_bytes=1 << 20, context_bytes=0)
    fresh = Look(words, machine).at(second)
    asked: list[tuple[int, int]] = []

    def noted(asked_for: Any, outline: Any, plain: int, recomputed: int, known: Known) -> Any:
        asked.append((plain, recomputed))
        return trace(asked_for, outline, plain, recomputed, known)

    monkeypatch.setattr(depth, "trace", noted)
    look = Look(words, machine)
    assert look.at(first).verdict.is_hopeless
    assert sorted(asked) == [(0, 3), (3, 0)]
    asked.clear()
    assert look.at(second) == fresh
    assert asked == [(0, 3)]


def test_a_processor_gets_no_larger_bins_than_the_model_suggests() -> None:
    cpu = replace(GPU, device="cpu", memory_bytes=1 << 40)
    run = replace(RUN, training=replace(RUN.training, recompute=0))
    found = largest_on(cpu, run, planned_choices(RUN.precision, "cpu"), LAYERS, 1, Known())
    assert (found.tokens, found.recomputed) == (RUN.model.suggest.tokens, 0) == (256, 0)
    assert "larger ones do not pay on a processor" in found.words(RUN, LAYERS, cpu)


def test_a_look_finds_them_and_turns_knobs_on_them() -> None:
    words = [word for word in SMALL if word != "precision=fp32"] + [*WORDS, "training.recompute=1"]
    look = Look(words, GPU)
    now = look.at(small_run(*WORDS, "training.recompute=1"))
    batching = now.run.batching
    assert now.chosen_bins
    assert now.verdict.fits
    assert (batching.bin_tokens, batching.accumulation) == (2048, 1), "there is room"
    assert now.bins == ["batching.tokens=2048", "batching.accumulation=1"]
    smaller = next(each for each in candidates(now.run) if each.overrides[0].startswith("batching.tokens="))
    turning = Turning(look)
    halved, narrow = (turning.run(now, each) for each in (smaller, Knob(("adapter.r=4",), LEARNING, "")))
    assert halved is not None
    assert (halved.batching.bin_tokens, halved.batching.accumulation) == (1024, 2)
    assert narrow is not None
    assert (narrow.batching, narrow.adapter.r) == (now.run.batching, 4), "bins that were found stay"
