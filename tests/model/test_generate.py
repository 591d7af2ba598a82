"""An answer does not depend on whom it was asked together with, nor on how it is shown."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3VLTextConfig

from app.base.tokenizer import load_tokenizer
from app.errors import ConfigError, PromptTooLong
from app.finished.inference import TextGenerator
from app.layers.attention import NAME
from app.model.decoding import end_ids, generate
from tests.model.small import batch_of, built, documents_of, lora, model_config, training_model_of

PROMPTS = ["Hi", "Name the opposite of new, and say why it is so.", "Who?", "Add one and two.", "Tell me more"]
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


@pytest.mark.parametrize("kind", ["gpt2", "mistral", "gpt_oss"])
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


def test_beams_find_answers_at_least_as_likely_as_greedy_ones(tokenizer: Any) -> None:
    asked = answerer(tokenizer, sampling={"do_sample": False, "num_beams": 4})
    ids = [asked.ids([user(prompt)]) for prompt in PROMPTS]
    greedy_answers, found = (generate(asked.lm, ids, [], NEW, num_beams=beams) for beams in (1, 4))
    gains = [
        likelihood(asked.lm, prompt, answer) - likelihood(asked.lm, prompt, plain)
        for prompt, answer, plain in zip(ids, found, greedy_answers, strict=True)
    ]
    assert min(gains) > -1e-4
    assert max(gains) > 1e-2
    alone = [next(asked.answers([[user(prompt)]], batch=1))[1] for prompt in PROMPTS]
    assert [text for _, text in sorted(asked.answers([[user(prompt)] for prompt in PROMPTS], batch=5))] == alone


def test_pieces_add_up_to_the_answer(tokenizer: Any) -> None:
    asked = answerer(tokenizer)
    pieces: list[str] = []
    answer = asked.stream([user("Hi")], pieces.append)
    assert len(pieces) > 3
    assert "".join(pieces).strip() == answer == dict(asked.answers([[user("Hi")]], 1))[0]


def test_a_template_that_refuses_is_told(tokenizer: Any) -> None:
    asked = answerer(tokenizer)
    before = tokenizer.chat_template
    tokenizer.chat_template = "{{ raise_exception('two users in a row') }}"
    try:
        with pytest.raises(ConfigError, match="rejects this conversation: two users in a row"):
            asked.ids([user("Hi"), user("Hi")])
    finally:
        tokenizer.chat_template = before


IDS = [d.tolist() for d in documents_of((12, 3, 7))]
NEW_IDS = 20  # past the window of 8


def greedy(lm: Any, prompt: list[int], **given: Any) -> list[int]:
    ids = torch.tensor([prompt])
    out = lm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_IDS, do_sample=False, **given)
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer


def likelihood(lm: Any, prompt: list[int], answer: list[int]) -> float:
    with torch.no_grad():
        scores = lm(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return float(scores[range(len(answer)), answer].sum())


@pytest.mark.parametrize(("kind", "own"), [("gemma3_text", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager")])
def test_greedy_answers_are_those_of_transformers_own_attention(kind: str, own: str) -> None:
    """With a cache; transformers' sdpa has neither caps nor sinks."""
    expected = [greedy(built(kind, own), prompt, eos_token_id=None) for prompt in IDS]
    for together in (False, True):
        assert generate(built(kind), IDS, [], NEW_IDS, together=together) == expected


def test_an_answer_stops_at_the_first_end_and_leaves_it_out() -> None:
    lm = built("llama")
    free = generate(lm, IDS[:1], [], NEW_IDS)[0]
    end = next(token for token in free if token != free[0])
    assert generate(lm, IDS[:1], [end, 2], NEW_IDS)[0] == free[: free.index(end)]
    assert generate(lm, IDS, [end, 2], NEW_IDS, together=True) == generate(lm, IDS, [end, 2], NEW_IDS)
    assert generate(lm, IDS[:1], [free[0]], NEW_IDS)[0] == []


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_as_it_was(training: bool) -> None:
    lm = built("llama").train(training)
    generate(lm, IDS, [2], 2)
    assert lm.training is training
    assert lm.config._attn_implementation == NAME
    with pytest.raises(IndexError):
        generate(lm, [[10_000]], [2], 2)
    assert lm.training is training
    assert lm.config._attn_implementation == NAME


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_answers_in_the_middle_of_training_change_nothing_of_it(precision: str) -> None:
    batch = batch_of(documents_of((6, 4)))
    losses = []
    for asks in (False, True):
        training_model = training_model_of("llama", lora(dropout=0.2), precision, recompute=True)
        torch.manual_seed(5)
        training_model(batch)
        if asks:
            with training_model.autocast(torch.device("cpu")):
                assert len(generate(training_model.language_model, IDS, [], 4)) == len(IDS)
        losses.append(float(training_model(batch)[0].detach()))
    assert losses[0] == losses[1]


def test_sampling_follows_the_seed() -> None:
    lm = built("llama")
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(generate(lm, IDS[:1], [], NEW_IDS, do_sample=True, temperature=1.5))
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("generation", "model", "tokenizer", "expected"),
    [([7, 5], 5, 9, [5, 7, 9]), (None, None, None, []), (None, [3], 3, [3])],
)
def test_ends_are_those_of_model_and_tokenizer(
    generation: Any, model: Any, tokenizer: Any, expected: list[int]
) -> None:
    lm = SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=generation), config=LlamaConfig(eos_token_id=model)
    )
    assert end_ids(lm, SimpleNamespace(eos_token_id=tokenizer)) == expected


def test_ends_of_model_type_without_end_id_are_those_of_tokenizer() -> None:
    lm = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None), config=Qwen3VLTextConfig())
    assert end_ids(lm, SimpleNamespace(eos_token_id=9)) == [9]


def test_answers_end_at_the_last_position(tokenizer: Any) -> None:
    notes: list[str] = []
    prompts = [[user("word " * n)] for n in (40, 8)]
    fits = 256 - len(answerer(tokenizer, "gpt2", chat=False).ids(prompts[1]))  # beside the shorter one alone
    asked = answerer(tokenizer, "gpt2", chat=False, max_new=fits, note=notes.append)
    alone = dict(enumerate(dict(asked.answers([each], 1))[0] for each in prompts))
    assert dict(asked.answers(prompts, 2)) == alone
    assert notes[0].endswith(f"the model's context length is 256, and the prompt has {len(asked.ids(prompts[0]))}")


def test_prompts_longer_than_the_positions_refused(tokenizer: Any) -> None:
    asked = answerer(tokenizer)
    with pytest.raises(PromptTooLong) as refusal:
        list(asked.answers([[user("Hi")], [user("word " * 400)]], 2))
    (problem,) = refusal.value.problems
    assert problem.startswith("prompts: number 2: ")
    assert problem.endswith(
        " tokens, but the model's context length is 256, with the answer. Shorten it, or choose a model with more."
    )
    with pytest.raises(PromptTooLong, match="prompt: "):
        asked.stream([user("word " * 400)], print)
