"""Ladders in their full size, and long ones in their small one too."""

import pytest

from tests.sweeps.test_ladder import LADDERS, NAMES, check_ladder, check_small_ladder


@pytest.mark.parametrize("name", NAMES)
def test_ladder_composes(name: str) -> None:
    check_ladder(name, "full")


@pytest.mark.parametrize("name", [name for name in NAMES if len(LADDERS[name].rungs) >= 10])
def test_long_ladder_small_makes_ten_steady_steps_of_rows(name: str) -> None:
    check_small_ladder(name)
