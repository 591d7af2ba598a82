"""Whatever is wrong with a model folder that a user gives: one message."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command import test_wrong_inputs
from tests.command.test_wrong_inputs import DAMAGE, check_incomplete
from tests.harness.runs import Zygote

whole_model = test_wrong_inputs.whole_model


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGE[:-3], ids=[message for _, _, message in DAMAGE[:-3]])
def test_incomplete_model_folder_is_reported(
    zygote: Zygote, tmp_path: Path, whole_model: Path, name: str, damage: Callable[[Path], object], message: str
) -> None:
    check_incomplete(zygote, tmp_path, whole_model, name, damage, message)
