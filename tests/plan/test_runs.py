"""Runs composed ahead, by a copy of this process or by itself: the same, each once."""

import subprocess
import sys

import pytest

from app.config.load import compose_run
from app.plan import forked, runs
from app.plan.knobs import candidates, turned
from app.plan.runs import Runs, Words, likely

WORDS = ["recipe=full", "model.weights=random"]
FITTING: Words = ("recipe=lora", "output_dir=somewhere")
OTHER: Words = ("recipe=qlora", "output_dir=somewhere")
AT_ODDS: Words = ("adapter=none", "quantization=nf4")


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[Words]:
    """What this process composes itself."""
    found: list[Words] = []

    def noted(words: Words) -> object:
        found.append(words)
        return compose_run(words)

    monkeypatch.setattr(runs, "compose_run", noted)
    return found


@pytest.fixture(params=[True, False])
def _with_and_without_a_copy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "_can_fork", lambda: request.param)


@pytest.mark.usefixtures("_with_and_without_a_copy")
def test_each_is_what_it_would_be() -> None:
    with Runs.begun([FITTING, AT_ODDS]) as found:
        found.arrive()
        assert found.of(FITTING) == compose_run(FITTING)
        assert found.of(AT_ODDS) is None
        assert found.of(OTHER) == compose_run(OTHER)


def test_what_a_copy_composed_is_not_composed_again(
    composed: list[Words], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked, "_can_fork", lambda: True)
    with Runs.begun([FITTING]) as found:
        found.arrive()
        found.arrive()
        assert found.of(FITTING) is not None
        assert not composed
        for _ in range(2):
            found.of(OTHER)
        assert composed == [OTHER]


def test_the_knobs_of_a_run_are_composed_ahead() -> None:
    run = compose_run(WORDS)
    alone = [turned(WORDS, [knob]) for knob in candidates(run, 1)]
    assert len(alone) > 5
    assert likely(WORDS, run, 1)[: len(alone)] == alone
    open_bins = [*WORDS, "batching.tokens=auto"]
    at_least = compose_run([*WORDS, f"batching.tokens={run.dataset.max_length}"])
    guessed = likely(open_bins, compose_run(open_bins), 1)
    assert set(guessed) >= {turned(open_bins, [knob]) for knob in candidates(at_least, 1)}


def test_what_goes_together_is_composed_ahead_once() -> None:
    words = [*WORDS, "parallel=zero2", "training.recompute=true"]
    sets = [frozenset(line) - frozenset(words) for line in likely(words, compose_run(words), 2)]
    slower = {"parallel=zero3", "training.offload=true"}
    for chosen in ([], ["optimizer=adamw_8bit"], ["precision=bf16", "precision.trained=bf16"]):
        assert sets.count(frozenset({*slower, *chosen})) == 1
    # of two that set the same the last one stays
    assert sets.count(frozenset({*slower, "optimizer=paged_adamw_8bit"})) == 1
    assert not [each for each in sets if {"optimizer=adamw_8bit", "optimizer=paged_adamw_8bit"} <= each]


@pytest.mark.usefixtures("_with_and_without_a_copy")
def test_the_order_of_words_means_nothing(composed: list[Words]) -> None:
    words: Words = (
        "recipe=full",
        "precision=bf16",
        "optimizer=adafactor",
        "optimizer.lr=1e-4",
        "precision.trained=bf16",
        "output_dir=somewhere",  # else it has the time in its name
    )
    with Runs.begun([]) as found:
        there = found.of(words)
        assert found.of(words[::-1]) is there
    assert compose_run(words[::-1]) == there is not None
    assert composed == [words]


def test_nothing_heavy_is_loaded_before_it_is_begun() -> None:
    program = "import sys, app.plan.runs; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
