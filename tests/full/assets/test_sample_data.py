"""The sample data: it is what its generator makes, and nothing that is held out can be seen in training."""

import gzip
import random
from functools import cache
from itertools import islice

import pytest

from app.assets import ROOT
from scripts.make_assets.__main__ import SEED, chat_rows, documents, make_files
from scripts.make_assets.chat import Row
from scripts.make_assets.forms import load_forms
from scripts.make_assets.skills import Skill, make_skills
from scripts.make_assets.world import invent
from tests.assets.test_sample_data import first_questions

SKILLS = make_skills(invent(SEED))


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


def test_sample_data_eval_unique_and_reworded() -> None:
    forms = load_forms()
    held_out = rows(True)
    assert len({(row.skill.name, row.items[0]) for row in held_out}) == len(held_out)
    new = {row.items[0].put(form) for row in held_out for form in forms[row.skill.name].eval}
    share = sum(row.questions[0] in new for row in held_out) / len(held_out)
    assert 0.4 < share < 0.6
    assert not new & first_questions("train.jsonl")


def test_sample_data_eval_items_untrained() -> None:
    taught = {(row.skill.name, item.key) for row in rows(False) for item in row.items}
    assert not taught & {(row.skill.name, item.key) for row in rows(True) for item in row.items}


@pytest.mark.parametrize("skill", SKILLS, ids=lambda skill: skill.name)
def test_sample_data_question_has_one_answer(skill: Skill) -> None:
    rng = random.Random(7)
    answers: dict[str, str] = {}
    for item in (skill.draw(rng) for _ in range(6000)):
        assert answers.setdefault(item.x, item.answer) == item.answer


def test_sample_text_neither_asks_nor_orders() -> None:
    asked = [text for form in load_forms().values() for text in [*form.asks, *form.eval]]
    openings = {text.split()[0] for text in asked} - {"{x}"}
    for text in islice(documents(), 3000):
        assert "?" not in text
        assert not {sentence.split()[0] for sentence in text.split(". ")} & openings


def test_sample_text_lacks_eval_items() -> None:
    forms = load_forms()
    text = "\n".join(islice(documents(), 4000))
    for row in rows(True):
        if not row.skill.closed:
            assert not any(row.items[0].put(said) in text for said in forms[row.skill.name].says)
