"""What was traced for one optimizer serves another: to the byte, in the order of storages, where it may."""

from dataclasses import replace
from itertools import chain, groupby, product

import pytest

from app.engine.step import Stepper
from app.model import lending
from app.optim.optimizers import OPTIMIZERS
from app.plan.depth import Depths
from app.plan.known import Known
from app.plan.memory_plan import MemoryPlan
from app.plan.planner import depths_of, planned_choices
from tests.plan.truth import PACKED, small_run

BF16 = ("precision=bf16", "precision.trained=bf16")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each forward and backward that is really made."""
    found: list[int] = []
    own = Stepper._backward

    def counted(stepper: Stepper, *given: object) -> object:
        found.append(1)
        return own(stepper, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Stepper, "_backward", counted)
    return found


def depths(*words: str, known: Known | None = None, device: str = "gpu", processes: int = 1) -> Depths:
    run = small_run(*words)
    shape = replace(PACKED, micro_batches=run.batching.accumulation)
    choices = planned_choices(run.precision, device)
    return depths_of(run, shape, device, choices, known=known, processes=processes)


def planned(depths: Depths, recompute: int) -> MemoryPlan:
    """What goes at one moment goes in no order: autocast lets go of its copies by their addresses."""
    plan = depths.planned(recompute, exact=True)
    together = groupby(plan.events or (), key=lambda event: event[1] > 0)
    events = [tuple(each if comes else sorted(each)) for comes, each in together]
    return replace(plan, events=tuple(chain.from_iterable(events)))


@pytest.mark.parametrize(
    ("words", "optimizer"),
    list(product(((), BF16), sorted(OPTIMIZERS))),
)
def test_a_plan_is_the_same(words: tuple[str, ...], optimizer: str, made: list[int]) -> None:
    known = Known()
    planned(depths("recipe=full", *words, known=known), 1)
    asked = ("recipe=full", f"optimizer={optimizer}", *words)
    alone = planned(depths(*asked), 1)
    assert len(made) == 2
    assert planned(depths(*asked, known=known), 1) == alone
    assert alone.events
    assert len(made) == 2, "nothing was made a third time"


@pytest.mark.parametrize(
    ("device", "words", "is_shared"),
    [
        ("cpu", ("recipe=full",), True),
        ("gpu", ("recipe=full", "batching.accumulation=3"), True),
        pytest.param(
            "gpu",
            ("recipe=full", "model.architecture.tie_word_embeddings=true"),
            True,
        ),
        pytest.param("gpu", ("recipe=lora",), False),  # gradients of q, k and v are parts of one
        ("gpu", ("recipe=qlora",), False),  # packed weights are unpacked into room that stays
        ("gpu", ("recipe=full", "precision=fp16"), False),  # the scale of the loss is made on the way
        pytest.param(
            "gpu",
            ("recipe=full", "training.offload=true", "training.recompute=2"),
            False,
        ),
        ("gpu", ("recipe=full", "optimizer.in_backward=true", "training.clip=0"), False),
        ("gpu", ("recipe=full", "parallel=zero2"), True),
        ("gpu", ("recipe=lora", "parallel=zero2"), True),  # gradients are in sums that were there before
        ("gpu", ("recipe=full", "parallel=zero3", "training.recompute=2"), True),
        pytest.param("gpu", ("recipe=lora", "parallel=zero3"), True),
    ],
)
def test_of_other_runs_too(
    device: str, words: tuple[str, ...], is_shared: bool, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "LEAST_BYTES", 4096)
    processes = 2 if any(word.startswith("parallel=") for word in words) else 1
    known = Known()
    first = depths(*words, "optimizer=adamw_8bit", known=known, device=device, processes=processes)
    planned(first, 2)
    alone = planned(depths(*words, "optimizer=adamw", device=device, processes=processes), 2)
    made_alone = len(made)
    shared = planned(depths(*words, "optimizer=adamw", known=known, device=device, processes=processes), 2)
    assert shared == alone
    assert len(made) - made_alone == (0 if is_shared else 1)


def test_another_shape_depth_arithmetic_or_division_is_made_anew(made: list[int]) -> None:
    words = ("recipe=full", "optimizer=adamw_8bit")
    known = Known()
    first = depths("recipe=full", known=known)
    planned(first, 1)
    others = [(*words, "batching.accumulation=2"), (*words, "precision=bf16")]
    for other in others:
        assert planned(depths(*other, known=known), 1) == planned(depths(*other), 1)
    assert len(made) == 1 + 2 * len(others)
    made.clear()
    divided = planned(depths(*words, "parallel=zero2", known=known, processes=2), 1)
    assert divided == planned(depths(*words, "parallel=zero2", processes=2), 1)
    assert planned(first, 2) == planned(depths("recipe=full"), 2)
    assert len(made) == 4
