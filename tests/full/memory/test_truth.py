"""Planned peaks against counted peaks of real steps: all recipes, optimizers and kernels."""

import pytest

from app.layers.operations import as_on_gpu
from app.memory.estimate import plan_memory
from app.memory.trace import EVALUATION
from tests.memory.test_truth import BF16, IN_BACKWARD, NEAR, PADDED_ROWS, difference
from tests.memory.truth import ANSWERS, DELTA_RULE, EXPERTS, PACKED, counted_peak, counted_peaks, small_run
from tests.optim.small import KINDS, OPTIONS

RECIPES = ("full", "lora", "qlora")


@pytest.mark.parametrize(
    ("recipe", "recompute", "packing"),
    [
        (recipe, recompute, PADDED_ROWS if (i + j) % 2 else "batching.packing=true")
        for i, recipe in enumerate(RECIPES)
        for j, recompute in enumerate(("0", "1", "true"))
    ],
)
def test_plan_equals_counted_step(recipe: str, recompute: str, packing: str) -> None:
    assert abs(difference(f"recipe={recipe}", f"training.recompute={recompute}", packing)) <= NEAR


@pytest.mark.parametrize("optimizer", [*KINDS, *OPTIONS])
def test_plan_of_every_optimizer_equals_counted_step(optimizer: str) -> None:
    assert abs(difference("recipe=full", *f"optimizer={optimizer}".split())) <= NEAR


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        *((kind, BF16 + IN_BACKWARD) for kind in ("adamw", "adamw_8bit", "muon", "adafactor")),
        ("adamw", IN_BACKWARD),
        ("muon", BF16),
        ("adafactor", BF16),
    ],
)
def test_plan_of_full_fine_tuning_in_bf16_equals_counted_step(optimizer: str, words: tuple[str, ...]) -> None:
    assert abs(difference("recipe=full", f"optimizer={optimizer}", "training.recompute=1", *words)) <= NEAR


@pytest.mark.parametrize(("precision", "recompute"), [("fp32", "1"), ("bf16", "0"), ("bf16", "true")])
@pytest.mark.parametrize("base", ["quantization=nf4", "quantization=fp4", "quantization=int8", "quantization=fp8"])
def test_plan_of_quantized_base_equals_counted_step(base: str, precision: str, recompute: str) -> None:
    words = (f"precision={precision}", f"training.recompute={recompute}")
    assert abs(difference("recipe=lora", base, *words)) <= NEAR


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recipe", ["full", "lora"])
def test_plan_of_mixture_of_experts_equals_counted_step(recipe: str, precision: str) -> None:
    assert abs(difference(*EXPERTS, f"recipe={recipe}", f"precision={precision}")) <= NEAR


def test_plan_of_gated_delta_rule_equals_counted_step() -> None:
    assert abs(difference(*DELTA_RULE, "recipe=lora", "training.recompute=1")) <= NEAR


@pytest.mark.parametrize(("base", "recompute"), [("none", "0"), ("nf4", "1"), ("int8", "0"), ("none", "1")])
def test_plan_of_adapted_experts_equals_counted_step(base: str, recompute: str) -> None:
    """Their stacks are unpacked at each use."""
    words = (*EXPERTS, "recipe=lora", "adapter.experts=true", f"quantization={base}", f"training.recompute={recompute}")
    assert abs(difference(*words)) <= NEAR


@pytest.mark.parametrize(
    "words",
    [
        "recipe=dpo adapter=none optimizer.lr=1e-3",
        "recipe=kto",
        *(f"recipe={r} quantization=nf4" for r in ("dpo", "kto")),
    ],
)
def test_plan_of_loss_over_answers_equals_counted_step(words: str) -> None:
    run = small_run(*words.split(), "training.recompute=0")
    assert abs(plan_memory(run, ANSWERS, "cpu").peak_bytes - counted_peak(run, ANSWERS)) <= NEAR


@pytest.mark.parametrize("recipe", RECIPES)
def test_plan_of_evaluation_equals_counted(recipe: str) -> None:
    run = small_run(f"recipe={recipe}")
    planned = plan_memory(run, PACKED, "cpu", exact=True).phases[EVALUATION]
    assert abs(planned - counted_peaks(run, PACKED)[1]) <= NEAR


@pytest.mark.parametrize("recipe", RECIPES)
def test_plan_with_gpu_kernels_equals_counted_step(recipe: str) -> None:
    run = small_run(f"recipe={recipe}", "training.recompute=0")
    with as_on_gpu():
        planned = plan_memory(run, PACKED, "cpu").peak_bytes
        assert abs(planned - counted_peak(run, PACKED)) <= NEAR


@pytest.mark.parametrize(
    ("model", "precision", "norm"),
    [
        *(("model=bert", (each,), "low") for each in ("precision=bf16", "precision=fp16")),
        ("model=bert", BF16, "fp32"),
        ("model.architecture.model_type=gpt_neox", ("precision=bf16",), "fp32"),
        ("model.architecture.model_type=gpt_neox", ("precision=fp16",), "fp32"),
        ("model.architecture.model_type=gpt_neox", BF16, "low"),
    ],
)
def test_plan_of_norms_equals_counted_step(model: str, precision: tuple[str, ...], norm: str) -> None:
    words = (model, "dataset=text", "dataset.path=none.txt", "recipe=full", f"model.norm={norm}")
    run = small_run(*words, *precision, "training.recompute=1")
    assert abs(plan_memory(run, PACKED, "cpu").peak_bytes - counted_peak(run, PACKED)) <= NEAR
