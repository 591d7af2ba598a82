"""A rehearsal changes nothing, whatever states an optimizer keeps."""

from pathlib import Path

import pytest

from tests.optim.small import KINDS
from tests.training.conftest import MakeLoop
from tests.training.test_rehearsal import LITTLE, check_rehearsal


@pytest.mark.parametrize("at", range(len(KINDS)), ids=KINDS)
def test_rehearsal_changes_no_number_and_no_checkpoint(at: int, make_loop: MakeLoop, folder: Path) -> None:
    check_rehearsal(make_loop, folder, f"optimizer={KINDS[at]}", "recipe=full", *(LITTLE if at % 2 else ()))
