"""None"""

import pytest

from tests.model.small import (
    MORE_KINDS,
)
from tests.model.test_attention import check_parity


@pytest.mark.parametrize("kind", MORE_KINDS)
def test_equals_the_models_own_eager_attention_for_more_kinds(kind: str) -> None:
    check_parity(kind)
