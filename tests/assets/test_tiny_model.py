"""The small model, its tokenizer, and the sample data."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from app.assets import ROOT, locate
from app.config.load import compose_run
from scripts.make_assets.scores import answered, held_out_chat, own_form, read_model

SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.text(" \n:a4<|end>", max_size=12)
PLAIN = ANY.filter(lambda text: not any(token in text for token in SPECIAL))
TALKS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), PLAIN), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(locate("asset:tiny"), local_files_only=True)


def render(tokenizer: Any, talk: list[tuple[str, str]]) -> str:
    messages = [{"role": role, "content": content} for role, content in talk]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    return text


def test_tiny_tokenizer_size_and_special_ids(tokenizer: Any) -> None:
    assert len(tokenizer) == tokenizer.vocab_size == 1536
    assert tokenizer.convert_ids_to_tokens(range(5)) == SPECIAL
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, None)
    assert tokenizer.is_fast
    assert tokenizer.padding_side == "right"


@given(text=PLAIN)
def test_tiny_tokenizer_roundtrip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@given(talk=TALKS)
def test_tiny_template_concatenates_messages(tokenizer: Any, talk: list[tuple[str, str]]) -> None:
    text = render(tokenizer, talk)
    ids = tokenizer(text).input_ids
    assert ids == [token for message in talk for token in tokenizer(render(tokenizer, [message])).input_ids]
    assert tokenizer.decode(ids) == text


def test_tiny_model_knows_text_but_no_answers() -> None:
    model, tokenizer = read_model(ROOT / "tiny")
    assert answered(model, own_form(tokenizer)[::8]).mean >= 0.95
    assert answered(model, held_out_chat(tokenizer)).mean <= 0.02


def test_tiny_model_config_equals_yaml() -> None:
    """`model.weights=random` builds from the YAML what config.json says of the weights that ship."""
    numbers = json.loads((ROOT / "tiny" / "config.json").read_text(encoding="utf-8"))
    assert compose_run([]).model.architecture.items() <= numbers.items()


def shipped(name: str) -> list[list[dict[str, Any]]]:
    lines = (ROOT / "sample" / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def first_questions(name: str) -> set[str]:
    return {next(m["content"] for m in messages if m["role"] == "user") for messages in shipped(name)}


def test_assets_stay_small() -> None:
    assert sum(path.stat().st_size for path in ROOT.rglob("*") if path.is_file()) < 6_000_000
    assert (ROOT / "sample" / "train.jsonl").stat().st_size < 1_200_000


def test_eval_questions_are_not_in_training() -> None:
    assert not first_questions("train.jsonl") & first_questions("eval.jsonl")
