"""What a knob is said to save is what the planner says of the settings with it, and it is said as one would type it."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from app.config.load import compose_run
from app.config.schema import RunConfig
from app.plan import forked
from app.plan.knobs import LEARNING, NUMBERS, SPEED, Knob, candidates, turned, words_of
from app.plan.look import Look
from app.plan.machine import Machine
from app.plan.runs import Runs
from app.plan.speed import seconds_per_token
from app.plan.turning import Turned, Turning, that_go_together
from tests.plan.facts import GPU, MIB, plan

LLAMA = ["model=llama"]


def run_of(words: Sequence[str], knobs: Sequence[Knob]) -> RunConfig | None:
    return Runs().of(turned(words, knobs))


def offered(*words: str) -> dict[str, int]:
    return {" ".join(knob.overrides): knob.costs for knob in candidates(compose_run(words))}


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
def test_only_what_changes_something_is_offered(words: list[str], wanted: dict[str, int]) -> None:
    assert offered(*words) == wanted
    run = compose_run(words)
    for knob in candidates(run):
        other = run_of(words, [knob])
        assert other is not None, knob
        assert other != run, knob


def test_dividing_is_offered_where_there_is_somebody_to_divide_with() -> None:
    def offered(processes: int, *words: str) -> list[str]:
        found = [knob.overrides[0] for knob in candidates(compose_run(words), processes)]
        return [each for each in found if each.startswith("parallel=")]

    assert offered(2, "recipe=full") == ["parallel=zero2", "parallel=zero3"]
    assert offered(1, "recipe=full") == []
    assert offered(2, "recipe=lora") == ["parallel=zero3"], "adapters have little to divide"
    assert offered(2, "recipe=full", "parallel=zero2") == ["parallel=zero3"]
    assert offered(2, "recipe=full", "parallel=zero3") == []


def test_dividing_is_left_out_where_there_are_fewer_tensors_than_processes() -> None:
    words = ["recipe=lora", "adapter.targets=[q_proj]", "model.weights=random"]
    look = Look(words, Machine("some", "some", "gpu", 10_000_000, 0, context_is_measured=True), processes=40)
    found = Turning(look).knobs(look.at(compose_run(words)))
    assert found
    assert not any("parallel=zero3" in each.knob.overrides for each in found)


def test_a_knob_takes_the_place_of_what_was_typed() -> None:
    words = ["model=llama", "recipe=full", "batching.tokens=4096", "batching.accumulation=3"]
    knobs = [
        Knob(("recipe=lora",), LEARNING, ""),
        Knob(("batching.tokens=2048", "batching.accumulation=6"), SPEED, ""),
    ]
    run = run_of(words, knobs)
    assert run is not None
    assert (run.adapter.kind, run.batching.tokens, run.batching.accumulation) == ("lora", 2048, 6)
    twice = words_of([*knobs, Knob(("batching.tokens=1",), SPEED, "")])
    assert twice == ["recipe=lora", "batching.tokens=1", "batching.accumulation=6"]
    assert run_of(words, [Knob(("adapter=none", "quantization=nf4"), SPEED, "")]) is None


def test_time_is_arithmetic_and_what_four_bits_cost_to_unpack() -> None:
    run = compose_run(["model=llama", "recipe=qlora", "batching.accumulation=2"])
    weights = 63 * 100 * MIB
    given = plan(quantization_constants=100, flops=3e15)
    seconds = seconds_per_token(run, given, 1000, GPU) * 1000 * 2
    assert seconds == pytest.approx(
        3e15 / 1e12 + 2 * 3 * weights * 2.5 / 1e11
    )  # 2 micro-batches, 3 uses in each
    kept = replace(run, training=replace(run.training, recompute=8))
    less = seconds - seconds_per_token(kept, given, 1000, GPU) * 1000 * 2
    assert less == pytest.approx(2 * 0.75 * weights * 2.5 / 1e11)
    assert seconds_per_token(run, given, 1000, replace(GPU, bytes_per_second=None)) == 3e15 / 1e12 / 2000


# With the real planner, on the small model
WORDS = ("model.weights=random", "recipe=full", "batching.tokens=512", "precision=bf16")


@pytest.fixture(scope="module")
def tried() -> Any:
    look = Look(WORDS, replace(GPU, memory_bytes=30 * MIB, context_bytes=0))
    now = look.at(compose_run(WORDS))
    return look, now, Turning(look).knobs(now)


def test_what_it_saves_is_the_difference_of_two_plans(tried: Any) -> None:
    look, now, knobs = tried
    assert {" ".join(each.knob.overrides) for each in knobs} >= {
        "training.recompute=true",
        "batching.tokens=256 batching.accumulation=2",
        "optimizer=adamw_8bit",
        "recipe=lora",
    }
    for each in knobs[:3]:
        other = look.at(compose_run([*WORDS, *each.knob.overrides]))
        assert each.saves_bytes == now.verdict.needed_bytes - other.verdict.needed_bytes > 0
    assert [each.knob.costs for each in knobs] == sorted(each.knob.costs for each in knobs)


def test_only_computing_again_is_slower(tried: Any) -> None:
    slower = {each.knob.overrides[0]: each.slower_by for each in tried[2]}
    assert 0.2 < slower["training.recompute=true"] < 0.34  # the backbone's forward once more, not the head's
    assert slower["optimizer=adamw_8bit"] == 0
    assert slower["recipe=lora"] < 0


def test_where_one_is_not_enough_some_are(tried: Any) -> None:
    look, now, knobs = tried
    two = [
        each
        for each in knobs
        if each.knob.overrides[0] in ("training.recompute=true", "optimizer=adamw_8bit")
    ]
    both = look.at(run_of(WORDS, [each.knob for each in two])).verdict.needed_bytes
    machine = replace(
        look.machine, memory_bytes=round((both - now.verdict.margin_bytes) / 0.96)
    )  # 3 % are margin
    found = Turning(Look(WORDS, machine)).together(now, two)
    assert found is not None
    assert found["override"] == "training.recompute=true optimizer=adamw_8bit"
    assert Turning(look).together(now, two[:1]) is None


def too_large_by(count: int) -> Any:
    """What is looked at, as far as it matters here."""
    verdict = SimpleNamespace(needed_bytes=1000 + count, memory_bytes=1000)
    return SimpleNamespace(chosen_bins=False, verdict=verdict)


def test_of_two_that_set_the_same_the_one_that_saves_more_is_taken() -> None:
    def turns(*saved: tuple[str, int]) -> list[Turned]:
        return [Turned(Knob((word,), NUMBERS, ""), saves, 0.0, fits=False) for word, saves in saved]

    paged, narrow = ("optimizer=paged_adamw_8bit", 5), ("optimizer=adamw_8bit", 4)
    shorter = ("training.max_steps=3", 1)

    def words(*saved: tuple[str, int]) -> list[str]:
        return [
            " ".join(each.knob.overrides) for each in that_go_together(["recipe=full"], turns(*saved), Runs())
        ]

    assert words(paged, narrow, shorter) == [paged[0], shorter[0]]
    assert words(narrow, shorter, paged) == [narrow[0], shorter[0], paged[0]], "the last one typed counts"
    assert words(("recipe=lora", 8), ("recipe=full", 1)) == ["recipe=lora"]
    with_adapters = ("optimizer.in_backward=true", 1)
    assert words(("recipe=lora", 8), with_adapters) == ["recipe=lora"], "they do not go together"


def test_where_one_is_enough_only_what_costs_less_is_tried_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "_can_fork", lambda: False)
    costs = {
        "recipe=qlora": LEARNING,
        "optimizer=sgd": NUMBERS,
        "eval.rows=2": NUMBERS,
        "seed=1": SPEED,
        "seed=2": SPEED,
    }

    def asked(enough: str) -> list[str]:
        seen: list[list[str]] = [[]]
        monkeypatch.setattr(Turning, "_tried", lambda _self, _words, *knobs: seen.append(words_of(knobs)))
        knobs = [Turned(Knob((word,), cost, ""), 9, 0.0, fits=word == enough) for word, cost in costs.items()]
        now = too_large_by(1)
        assert Turning(Look(["recipe=full"], GPU)).together(now, knobs) is None
        return max(seen, key=len)

    assert asked("recipe=qlora") == ["optimizer=sgd", "eval.rows=2", "seed=1"], (
        "none that changes what is learned"
    )
    assert asked("optimizer=sgd") == [], "of two that set the same one is left, which was tried alone"
    assert asked("seed=1") == [], "nothing costs less"


def test_what_saves_next_to_nothing_is_taken_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {"seed=1": 4, "eval.rows=2": 300, "training.clip=2": 200}

    def found(needed: int) -> Any:
        def tried(_self: Turning, _words: Any, *knobs: Knob) -> Any:
            saves = sum(saved[word] for word in words_of(knobs))
            return SimpleNamespace(fits=saves >= needed, needed_bytes=saves)

        monkeypatch.setattr(Turning, "_tried", tried)
        knobs = [Turned(Knob((word,), SPEED, ""), saves, 0.0, fits=False) for word, saves in saved.items()]
        return Turning(Look([], GPU)).together(too_large_by(500), knobs)

    assert found(500) == {"override": "eval.rows=2 training.clip=2", "needed_bytes": 500}
    assert found(502) == {"override": "eval.rows=2 training.clip=2 seed=1", "needed_bytes": 504}
    assert found(505) is None


@pytest.mark.parametrize("too_much", [1, 3, 4, 9])
@pytest.mark.parametrize("enough", [0, 2, 3, 4, 5, 6, None])
def test_as_few_as_fit_are_found(enough: int | None, too_much: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six knobs that save one each: as many as ought to be enough, or, where those are not, more by halving."""
    monkeypatch.setattr(forked, "_can_fork", lambda: False)
    six = [
        "seed=1",
        "dataset.max_length=64",
        "training.clip=2",
        "training.max_steps=3",
        "eval.rows=2",
        "optimizer=sgd",
    ]
    knobs = [Turned(Knob((word,), SPEED, ""), 1, 0.0, fits=False) for word in six]
    asked = []

    def at(self: Look, run: RunConfig) -> Any:
        changed = [
            run.seed == 1,
            run.dataset.max_length == 64,
            run.training.clip == 2,
            run.training.max_steps == 3,
            run.eval.rows == 2,
            run.optimizer.kind == "sgd",
        ]
        asked.append(sum(changed))
        assert changed == [place < sum(changed) for place in range(6)]
        fits = enough is not None and sum(changed) >= enough
        verdict = SimpleNamespace(needed_bytes=sum(changed), fits=fits)
        return SimpleNamespace(
            run=run, plan=plan(flops=1.0), shape=SimpleNamespace(tokens=1), verdict=verdict
        )

    monkeypatch.setattr(Look, "at", at)
    found = Turning(Look([], GPU)).together(too_large_by(too_much), knobs)
    estimated = min(max(too_much, 2), 6)
    assert asked[:2] == sorted({estimated, 6})
    if enough is None:
        assert found is None
        assert len(asked) <= 2
    else:
        wanted = max(enough, estimated)
        assert found == {"override": " ".join(six[:wanted]), "needed_bytes": wanted}
        assert len(asked) <= 4
