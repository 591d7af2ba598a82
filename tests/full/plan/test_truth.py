"""The planned peak against the counted peak of a real step."""

import pytest

from tests.plan.test_truth import NEAR, RECIPES, difference


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("recompute", ["0", "true"])
def test_equals_a_real_step(recipe: str, recompute: str) -> None:
    assert abs(difference("padded", f"recipe={recipe}", f"training.recompute={recompute}")) <= NEAR
