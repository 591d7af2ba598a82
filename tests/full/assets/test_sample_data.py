"""The sample data: it is what its generator makes, and nothing that is held out can be seen in training."""

import gzip
from functools import cache
from itertools import islice

import pytest

from app.assets import ROOT
from scripts.make_assets.__main__ import chat_rows, documents, make_files
from scripts.make_assets.chat import Row
from scripts.make_assets.forms import load_forms


@cache
def rows(held_out: bool) -> list[Row]:
    return chat_rows(held_out)


def test_sample_data_equals_generator() -> None:
    for name, content in make_files().items():
        found = (ROOT / name).read_bytes()
        found = gzip.decompress(found) if name.endswith(".gz") else found
        assert found.decode() == content, f"{name}: run python -m scripts.make_assets"


@pytest.mark.parametrize("held_out", [False, True])
def test_sample_data_items_in_their_split(held_out: bool) -> None:
    assert all(row.skill.holds_out(item) is held_out for row in rows(held_out) for item in row.items)


def test_sample_data_eval_items_untrained() -> None:
    taught = {(row.skill.name, item.key) for row in rows(False) for item in row.items}
    assert not taught & {(row.skill.name, item.key) for row in rows(True) for item in row.items}


def test_sample_text_lacks_eval_items() -> None:
    forms = load_forms()
    text = "\n".join(islice(documents(), 4000))
    for row in rows(True):
        if not row.skill.closed:
            assert not any(row.items[0].put(said) in text for said in forms[row.skill.name].says)
