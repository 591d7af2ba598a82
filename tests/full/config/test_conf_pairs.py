"""Every recipe, which changes other groups, composes with every choice of the main groups."""

import pytest

from tests.choices import taking_turns
from tests.config.test_conf import CHOICES, require_choices, with_turns

MAIN = ("model", "dataset", "optimizer")
RUNS = [
    {"recipe": recipe, **dict(zip(MAIN, names, strict=True))}
    for recipe in CHOICES["recipe"]
    for names in taking_turns(*(CHOICES[group] for group in MAIN))
]


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_conf_every_pair_with_a_recipe_composes(number: int) -> None:
    require_choices(with_turns(RUNS[number], number))
