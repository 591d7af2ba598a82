"""Relative differences: one that is not a number is never passed over."""

import math

import pytest
import torch

from app.errors import EnvironmentProblem
from app.layers.comparison import Comparison, attempt, max_difference


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_max_difference_non_finite_number_fails_comparison(spoilt: float, place: int) -> None:
    expected = [torch.ones(3), torch.arange(4.0)]
    found = [each.clone() for each in expected]
    assert max_difference(found, expected) == 0.0
    found[place][2] = spoilt
    assert not Comparison("", max_difference(found, expected), 1.0).passed


def test_max_difference_zeros_are_near_zeros_alone() -> None:
    assert max_difference([torch.zeros(3)], [torch.zeros(3)]) == 0.0
    assert max_difference([torch.ones(3)], [torch.zeros(3)]) > 1e30
    assert max_difference([torch.full((4,), 1.25, dtype=torch.bfloat16)], [torch.ones(4)]) == pytest.approx(0.25)


def _broken() -> Comparison:
    raise RuntimeError("no\ncompiler")


def test_comparison_that_fails_refuses_or_leaves() -> None:
    causes: list[str] = []
    differs, fault = Comparison("a", math.nan, 1.0), attempt(_broken, RuntimeError, "cannot ({})")
    for found in (differs, fault):
        assert found.or_leave(causes.append) == []
        with pytest.raises(EnvironmentProblem, match="Set x"):
            found.or_refuse("Set x")
    assert causes == ["a differs by nan (allowed 1.0e+00)", "cannot (no compiler)"]
    equal = attempt(lambda: Comparison("a", 0.5, 1.0), RuntimeError)
    assert equal.or_leave(causes.append) == [equal.or_refuse("Set x")] == [equal]
    assert len(causes) == 2
    with pytest.raises(RuntimeError):
        attempt(_broken, ())
