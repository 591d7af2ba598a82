"""The planned peak against the counted peak of a real step."""

from dataclasses import replace
from itertools import product

import pytest

from app.model import lending
from app.optim.optimizers import OPTIMIZERS
from app.plan.planner import plan_memory
from app.plan.stages import EVALUATION
from tests.plan.truth import EXPERTS, PACKED, PADDED, TOGETHER, counted_peak, counted_peaks, small_run

NEAR = 4096
RECIPES = ("full", "lora", "qlora")
SHAPES = {"packed": PACKED, "padded": PADDED}


def difference(layout: str, *overrides: str, micro_batches: int = 1) -> int:
    run = small_run(f"batching.packing={str(layout == 'packed').lower()}", *overrides)
    shape = replace(SHAPES[layout], micro_batches=micro_batches)
    return plan_memory(run, shape, "cpu").peak_bytes - counted_peak(run, shape)


@pytest.mark.parametrize(
    ("recipe", "layout", "recompute"),
    [*product(RECIPES, ("packed",), ("0", "1", "true")), *product(RECIPES, ("padded",), ("1",))],
)
def test_equals_a_real_step(recipe: str, layout: str, recompute: str) -> None:
    assert abs(difference(layout, f"recipe={recipe}", f"training.recompute={recompute}")) <= NEAR


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_with_every_optimizer(optimizer: str) -> None:
    assert abs(difference("packed", "recipe=full", f"optimizer={optimizer}")) <= NEAR


@pytest.mark.parametrize(
    ("recipe", "precision"), [("full", "bf16"), ("lora", "bf16"), ("qlora", "bf16"), ("lora", "fp16")]
)
def test_in_sixteen_bits(recipe: str, precision: str) -> None:
    assert abs(difference("packed", f"recipe={recipe}", f"precision={precision}")) <= NEAR


BF16 = ("precision=bf16", "precision.trained=bf16")
AS_THEY_COME = ("optimizer.in_backward=true", "training.clip=0")


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "muon", "adafactor"])
@pytest.mark.parametrize(
    "words", [BF16, AS_THEY_COME, BF16 + AS_THEY_COME], ids=["bf16", "in_backward", "both"]
)
def test_of_a_whole_model_in_little_memory(words: tuple[str, ...], optimizer: str) -> None:
    recomputed = ("training.recompute=1",)
    assert abs(difference("packed", "recipe=full", f"optimizer={optimizer}", *recomputed, *words)) <= NEAR


def test_what_it_saves_at_the_end_of_a_step() -> None:
    """Two bytes of a weight and two of its gradient; and then all of the gradient."""
    plain, narrow, as_they_come = (
        plan_memory(small_run("recipe=full", *words), PACKED, "cpu", steps_only=True)
        for words in ((), BF16, BF16 + AS_THEY_COME)
    )
    weights = plain.anatomy["trained_weights"]
    assert plain.kept_bytes - narrow.kept_bytes == pytest.approx(weights, rel=0.01)
    assert narrow.kept_bytes - as_they_come.kept_bytes == pytest.approx(weights / 2, rel=0.01)


@pytest.mark.parametrize("recipe", ["full", "lora"])
def test_with_gradients_of_the_micro_batch_before(recipe: str) -> None:
    """Three cost what two cost."""
    one = difference("packed", f"recipe={recipe}")
    three = difference("packed", f"recipe={recipe}", micro_batches=3)
    assert max(abs(one), abs(three)) <= NEAR


@pytest.mark.parametrize("recipe", ["lora", "qlora"])
def test_with_fused_layers(recipe: str) -> None:
    fused, plain = (small_run(f"recipe={recipe}", f"adapter.fused={on}") for on in ("true", "false"))
    assert abs(plan_memory(fused, PACKED, "cpu").peak_bytes - counted_peak(fused, PACKED)) <= NEAR
    assert abs(plan_memory(plain, PACKED, "cpu").peak_bytes - counted_peak(plain, PACKED)) <= NEAR


@pytest.mark.parametrize(
    ("fused", "precision", "recompute"),
    [("true", "fp32", "1"), ("false", "bf16", "0"), ("true", "bf16", "true")],
)
def test_on_a_base_in_fp8(fused: str, precision: str, recompute: str) -> None:
    given = (f"adapter.fused={fused}", f"precision={precision}", f"training.recompute={recompute}")
    assert abs(difference("packed", "recipe=lora", "quantization=fp8", *given)) <= NEAR


@pytest.mark.parametrize(
    "words",
    [
        ("recipe=full", "training.recompute=1"),
        ("recipe=full", "optimizer=adamw_8bit"),
        ("recipe=full", *BF16),
        ("recipe=full", "optimizer=adafactor", "batching.packing=false"),
        ("recipe=lora",),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_of_one_process_of_several_that_divide(words: tuple[str, ...], micro_batches: int) -> None:
    run = small_run("parallel=zero2", *words)
    shape = replace(SHAPES["packed" if run.batching.packing else "padded"], micro_batches=micro_batches)
    planned = plan_memory(run, shape, "cpu", processes=TOGETHER, steps_only=True)
    counted = [counted_peak(run, shape, rank) for rank in range(TOGETHER)]
    assert abs(planned.peak_bytes - max(counted)) <= NEAR
    assert planned.divided
    whole = plan_memory(run, shape, "cpu", steps_only=True)
    kept = planned.anatomy["gradients"] + planned.anatomy["optimizer_states"]
    assert kept < 0.5 * (
        whole.kept_bytes - whole.anatomy["trained_weights"] - whole.anatomy["frozen_weights"]
    )


@pytest.mark.parametrize(
    "words",
    [
        ("recipe=full",),
        ("recipe=full", "training.recompute=true"),
        ("recipe=full", *BF16),
        ("recipe=full", "optimizer=adafactor", "batching.packing=false", "training.recompute=1"),
        ("recipe=lora",),
        ("recipe=qlora", "training.recompute=true"),
        ("recipe=qlora", "quantization=fp8", "batching.packing=false"),
        ("recipe=lora", "model.architecture.num_hidden_layers=8"),
        ("recipe=full", "model.architecture.num_hidden_layers=7", "training.recompute=4"),
        ("recipe=full", "model.architecture.num_hidden_layers=6", *BF16),
    ],
    ids=" ".join,
)
def test_of_one_process_of_several_that_lend(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where depth is extrapolated layers come as a whole but for what is surely kept: never too little."""
    monkeypatch.setattr(lending, "LEAST_BYTES", 4096)  # in four bits these are small
    run = small_run("parallel=zero3", *words)
    shape = SHAPES["packed" if run.batching.packing else "padded"]
    planned = plan_memory(run, shape, "cpu", processes=TOGETHER)
    steps, evaluations = zip(*(counted_peaks(run, shape, rank) for rank in range(TOGETHER)), strict=True)
    counted = max(steps)
    layer = planned.anatomy["borrowed_weights"] / 2
    above = layer if run.model.architecture["num_hidden_layers"] > 5 else NEAR
    assert -NEAR <= planned.peak_bytes - counted <= above
    assert -NEAR <= planned.phases[EVALUATION] - max(evaluations) <= above
    assert planned.divided
    exact = plan_memory(run, shape, "cpu", processes=TOGETHER, steps_only=True, exact=True)
    assert abs(exact.peak_bytes - counted) <= NEAR
    assert planned.anatomy["borrowed_weights"] > 0


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("divided", ["auto", "zero2", "zero3"])
def test_of_an_evaluation(divided: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "LEAST_BYTES", 4096)
    run = small_run(f"recipe={recipe}", f"parallel={divided}")
    if divided == "auto":
        counted, count = counted_peaks(run, PACKED)[1], 1
    else:
        counted, count = max(counted_peaks(run, PACKED, rank)[1] for rank in range(TOGETHER)), TOGETHER
    planned = plan_memory(run, PACKED, "cpu", processes=count, exact=True).phases[EVALUATION]
    assert abs(planned - counted) <= NEAR


@pytest.mark.parametrize("layout", SHAPES)
def test_of_an_encoder(layout: str) -> None:
    """Padding is a document of its own there."""
    shapes = {"packed": PACKED, "padded": replace(PADDED, documents=(50, 14, 40, 24, 20, 44), places=6)}
    packing = f"batching.packing={str(layout == 'packed').lower()}"
    run = small_run("model=bert", "dataset=text", "dataset.path=none.txt", "recipe=full", packing)
    shape = shapes[layout]
    assert abs(plan_memory(run, shape, "cpu").peak_bytes - counted_peak(run, shape)) <= NEAR


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recipe", ["full", "lora"])
def test_of_a_mixture_of_experts(recipe: str, precision: str) -> None:
    assert abs(difference("packed", *EXPERTS, f"recipe={recipe}", f"precision={precision}")) <= NEAR


@pytest.mark.parametrize(("recipe", "recompute"), [("lora", "true"), ("full", "2")])
def test_with_inputs_of_layers_on_the_host(recipe: str, recompute: str) -> None:
    """On a CPU that is the same memory, and the copies are counted like all else."""
    words = (f"recipe={recipe}", f"training.recompute={recompute}", "training.offload=true")
    assert abs(difference("packed", *words)) <= NEAR
    assert abs(difference("packed", *words, "precision=bf16")) <= NEAR
