"""Plans of compiled layers of more methods and kinds against bytes that layers compiled by torch save."""

import pytest

from app.config.load import compose_run
from app.memory.estimate import Estimate
from app.memory.trace import worst_case
from app.training.auto_settings import Choices
from tests.memory.test_compiled_layers import check_saved_bytes, graphs_of_one_test, pytestmark

assert graphs_of_one_test  # a fixture
assert pytestmark


@pytest.mark.parametrize(
    "words",
    [
        ("recipe=full", "compile.memory_budget=1.0"),
        ("recipe=full", "precision=fp32", "compile.memory_budget=0.4"),
        ("recipe=lora", "compile.memory_budget=0.3", "training.recompute=1"),
        ("recipe=qlora",),
        ("recipe=lora", "quantization=int8"),
        ("recipe=lora", "quantization=fp8"),
        ("recipe=lora", "model.architecture.model_type=qwen3", "+model.architecture.head_dim=32"),
        ("recipe=lora", "model.architecture.model_type=gemma3_text", "+model.architecture.head_dim=32"),
    ],
    ids=" ".join,
)
def test_saved_bytes_of_compiled_layers_equal_plan(words: tuple[str, ...]) -> None:
    check_saved_bytes(*words)


def test_layers_of_8b_recompute_only_thin_products_at_the_default_budget() -> None:
    words = ("model=llama", "model.weights=random", "recipe=lora", "adapter.r=16", "compile=blocks")
    run = compose_run([*words, "batching.tokens=16384", "dataset.max_length=2048", "training.recompute=0"])
    shape = worst_case(run)
    estimate = Estimate(run, shape, "gpu", Choices("bf16", "varlen", "blocks"))
    plans = {budget: estimate.planned(0, budget) for budget in (0.6, 0.4)}
    share = {budget: 1 - plan.flops_per_token * shape.tokens / plan.flops for budget, plan in plans.items()}
    assert share[0.6] < 0.002
    assert 0.05 < share[0.4] < 0.15
    assert plans[0.4].peak_bytes < 0.85 * plans[0.6].peak_bytes
