"""The table of docs/models.md is that of today's plans."""

import pytest

from scripts.make_models import PAGE, row_of


@pytest.mark.parametrize("name", ["qwen3_0_6b", "qwen3_30b_a3b", "gemma3_1b"])
def test_row_is_as_it_would_be_made(name: str) -> None:
    assert row_of(name) in PAGE.read_text().splitlines()
