"""docs/keys.md and the table of docs/coming-from.md are those that `python -m scripts.make_keys` makes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.make_keys import PAGES


@pytest.mark.parametrize(("file", "page"), PAGES.items(), ids=[file.name for file in PAGES])
def test_page_is_fresh(file: Path, page: Callable[[], str]) -> None:
    assert file.read_text() == page(), "run python -m scripts.make_keys"
