"""Depth extrapolated from a small trace against a trace of every layer."""

import pytest

from tests.plan.test_depth import check_all_layers, check_stepped_in_the_backward_pass


@pytest.mark.parametrize(
    ("recipe", "recompute"),
    [
        ("full", "1"),
        ("full", "4"),
        ("full", "8"),
        ("lora", "0"),
        ("qlora", "0"),
        ("qlora", "1"),
        ("qlora", "8"),
    ],
)
def test_equals_the_trace_of_all_layers(recipe: str, recompute: str) -> None:
    check_all_layers(recipe, recompute)


@pytest.mark.parametrize(
    ("recompute", "precision"), [("4", "fp32"), ("0", "bf16"), ("4", "bf16"), ("true", "bf16")]
)
def test_with_weights_stepped_in_the_backward_pass(recompute: str, precision: str) -> None:
    check_stepped_in_the_backward_pass(recompute, precision)
