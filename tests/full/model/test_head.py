"""None"""

from typing import Any

import pytest

from tests.model.small import (
    MORE_KINDS,
    lora,
    trainee_of,
)
from tests.model.test_head import check_against_plain, chunked


@pytest.mark.parametrize("adapter", [None, lora()], ids=["full", "lora"])
@pytest.mark.parametrize("kind", MORE_KINDS)
def test_loss_and_gradient_equal_those_of_all_logits_for_more_kinds(kind: str, adapter: Any) -> None:
    check_against_plain(chunked(trainee_of(kind, adapter), 7))
