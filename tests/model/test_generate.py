"""An answer does not depend on whom it was asked together with, nor on how it is shown."""

from typing import Any

import pytest
import torch

from app.errors import ConfigError
from app.model.generate import TextGenerator, generate
from app.model.tokenizer import load_tokenizer
from tests.model.small import built, model_config

PROMPTS = [
    "Hi",
    "Name the opposite of new, and say why it is so.",
    "Who?",
    "Add one and two.",
    "Tell me more",
]
NEW = 12


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(model_config(), needs_template=True)


def answerer(tokenizer: Any, kind: str = "llama", **given: Any) -> TextGenerator:
    lm = built(kind, "eager", vocab_size=len(tokenizer), max_position_embeddings=256, n_positions=256)
    settings: dict[str, Any] = {"chat": True, "max_new": NEW, "sampling": {"do_sample": False}} | given
    return TextGenerator(lm, tokenizer, **settings)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_prompts_are_rendered_as_in_training(tokenizer: Any) -> None:
    said = [{"role": "system", "content": "Be kind."}, user("Hi")]
    expected = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(answerer(tokenizer).ids(said)) == expected
    plain = answerer(tokenizer, chat=False)
    assert plain.ids([user("Hi")]) == tokenizer("Hi").input_ids
    assert plain.ids(said) == tokenizer("Be kind.\n\nHi").input_ids


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2", "gemma2", "gpt_oss"])
def test_asked_together_or_alone_the_answers_are_the_same(tokenizer: Any, kind: str) -> None:
    asked = answerer(tokenizer, kind)
    conversations = [[user(prompt)] for prompt in PROMPTS]
    alone = dict(asked.answers(conversations, batch=1))
    for batch in (2, 5):
        together = list(asked.answers(conversations, batch))
        assert sorted(place for place, _ in together) == list(range(len(PROMPTS)))
        assert dict(together) == alone
    ids = [asked.ids(each) for each in conversations]
    plain = generate(asked.lm, ids, [1], NEW)
    texts = [tokenizer.decode(new, skip_special_tokens=True).strip() for new in plain]
    assert [alone[place] for place in range(len(PROMPTS))] == texts
    assert len(set(texts)) > 1


def test_pieces_add_up_to_the_answer(tokenizer: Any) -> None:
    asked = answerer(tokenizer)
    pieces: list[str] = []
    answer = asked.stream([user("Hi")], pieces.append)
    assert len(pieces) > 3
    assert "".join(pieces).strip() == answer == dict(asked.answers([[user("Hi")]], 1))[0]


def test_sampling_follows_the_seed(tokenizer: Any) -> None:
    sampling = {"do_sample": True, "temperature": 1.0, "top_p": 0.9, "top_k": 5}
    asked = answerer(tokenizer, sampling=sampling)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(dict(asked.answers([[user("Hi")]], 1))[0])
    assert found[0] == found[1] != found[2]


def test_a_template_that_refuses_is_told(tokenizer: Any) -> None:
    asked = answerer(tokenizer)
    before = tokenizer.chat_template
    tokenizer.chat_template = "{{ raise_exception('two users in a row') }}"
    try:
        with pytest.raises(ConfigError, match="refuses this conversation: two users in a row"):
            asked.ids([user("Hi"), user("Hi")])
    finally:
        tokenizer.chat_template = before
