"""docs/keys.md is the page that `python -m scripts.make_keys` makes of the schema and conf/."""

from app.config.schema import RunConfig
from app.config.validate import leaf_keys
from scripts.make_keys import PAGE, keys_page


def test_keys_page_is_fresh() -> None:
    assert PAGE.read_text() == keys_page(), "run python -m scripts.make_keys"


def test_every_key_is_on_the_keys_page() -> None:
    page = PAGE.read_text()
    assert [key for key in leaf_keys(RunConfig) if f"| `{key}` | " not in page] == []
