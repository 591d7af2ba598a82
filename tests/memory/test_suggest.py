"""Suggestions of settings that save memory, against plans of those settings."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from app.config.load import compose_run
from app.config.schema import RunConfig
from app.memory.estimate import seconds_per_token
from app.memory.planner import LEARNING, NUMBERS, SPEED, Candidate, Planner, Suggestion, Suggestions, candidates
from tests.memory.facts import GPU, MIB, plan


def run_of(words: Sequence[str], chosen: Sequence[Candidate]) -> RunConfig | None:
    return Suggestions(Planner(GPU), words).run(chosen)


def costs_of_candidates(*words: str) -> dict[str, int]:
    return {" ".join(each.overrides): each.costs for each in candidates(compose_run(words))}


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
    run = compose_run(words)
    for candidate in candidates(run):
        other = run_of(words, [candidate])
        assert other is not None, candidate
        assert other != run, candidate


def test_smaller_micro_batches_tell_whether_a_step_grows() -> None:
    told = {
        rows: next(each.why for each in candidates(compose_run(words)) if "batching.accumulation" in each.overrides[-1])
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


def test_seconds_per_token_add_dequantisation_to_compute() -> None:
    run = compose_run(["model=llama", "recipe=qlora", "batching.accumulation=2"])
    weights = 63 * 100 * MIB
    given = plan(quantization_constants=100, flops=3e15)
    seconds = seconds_per_token(run, given, 1000, GPU) * 1000 * 2
    assert seconds == pytest.approx(3e15 / 1e12 + 2 * 3 * weights * 2.5 / 1e11)  # 2 micro-batches, 3 uses in each
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
    assert asked == [["optimizer=sgd", "eval.rows=2", "seed=1"]], "no suggestion that changes what is learned"


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


def test_candidates_are_planned_with_resolved_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RunConfig] = []
    monkeypatch.setattr(Planner, "at", lambda _self, run: seen.append(run))
    words = ("batching.tokens=auto", "batching.accumulation=8")
    found = compose_run(["batching.tokens=2048", "batching.accumulation=1"])
    now: Any = SimpleNamespace(chosen_bins=True, parallel_reason="", run=found)
    smaller = Candidate(("batching.tokens=1024", "batching.accumulation=2"), SPEED, "")
    for candidate in (smaller, Candidate(("adapter.r=4",), LEARNING, "")):
        Suggestions(Planner(GPU), words).plan(now, [candidate])
    batching = [(run.batching.tokens, run.batching.accumulation) for run in seen]
    assert batching == [(1024, 2), (2048, 1)]
    assert seen[1].adapter.r == 4
