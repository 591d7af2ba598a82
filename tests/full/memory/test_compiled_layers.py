"""Plans of compiled layers of more methods and kinds against bytes that layers compiled by torch save."""

import pytest

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
