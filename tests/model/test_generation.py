from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.model.attention import NAME
from app.model.generate import end_ids, generate
from tests.model.small import batch_of, built, documents_of, lora, training_model_of

PROMPTS = [d.tolist() for d in documents_of((12, 3, 7))]
NEW = 20  # past the window of 8


def greedy(lm: Any, prompt: list[int], **given: Any) -> list[int]:
    ids = torch.tensor([prompt])
    out = lm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, **given)
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("llama", "sdpa"),
        ("mistral", "sdpa"),
        ("gemma3_text", "sdpa"),
        ("gemma2", "eager"),
        ("gpt_oss", "eager"),
    ],
)
def test_greedy_answers_are_those_of_transformers_own_attention(kind: str, own: str) -> None:
    """With a cache; transformers' sdpa has neither caps nor sinks."""
    expected = [greedy(built(kind, own), prompt, eos_token_id=None) for prompt in PROMPTS]
    assert generate(built(kind), PROMPTS, [], NEW) == expected


def test_an_answer_stops_at_the_first_end_and_leaves_it_out() -> None:
    lm = built("llama")
    free = generate(lm, PROMPTS[:1], [], NEW)[0]
    end = next(token for token in free if token != free[0])
    assert generate(lm, PROMPTS[:1], [end, 2], NEW)[0] == free[: free.index(end)]
    assert generate(lm, PROMPTS[:1], [free[0]], NEW)[0] == []


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_as_it_was(training: bool) -> None:
    lm = built("llama").train(training)
    generate(lm, PROMPTS, [2], 2)
    assert lm.training is training
    assert lm.config._attn_implementation == NAME
    with pytest.raises(IndexError):
        generate(lm, [[10_000]], [2], 2)
    assert lm.training is training
    assert lm.config._attn_implementation == NAME


def test_a_model_with_another_attention_keeps_it() -> None:
    lm = built("llama", "eager")
    assert generate(lm, PROMPTS, [], NEW) == generate(built("llama"), PROMPTS, [], NEW)
    assert lm.config._attn_implementation == "eager"


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
                assert len(generate(training_model.language_model, PROMPTS, [], 4)) == len(PROMPTS)
        losses.append(float(training_model(batch)[0].detach()))
    assert losses[0] == losses[1]


def test_sampling_follows_the_seed() -> None:
    lm = built("llama")
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(generate(lm, PROMPTS[:1], [], NEW, do_sample=True, temperature=1.5))
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("generation", "model", "tokenizer", "expected"),
    [([7, 5], 5, 9, [5, 7, 9]), (None, None, None, []), (None, [3], 3, [3])],
)
def test_ends_are_those_of_model_and_tokenizer(
    generation: Any, model: Any, tokenizer: Any, expected: list[int]
) -> None:
    lm = SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=generation), config=SimpleNamespace(eos_token_id=model)
    )
    assert end_ids(lm, SimpleNamespace(eos_token_id=tokenizer)) == expected
