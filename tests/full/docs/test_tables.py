"""Tables in the docs that take half a minute to make; the others are in tests/docs/test_pages.py."""

from scripts import make_bytes


def test_table_of_bytes_is_fresh() -> None:
    for file, page in make_bytes.PAGES.items():
        assert file.read_text() == page(), "run python -m scripts.make_bytes"
