"""Scores of a tiny model on its world: in running text, and as answers to held-out chat questions.

Uses plain transformers and peft, which also checks that the files of a run load there. Only complete answers count:
each token must have the highest probability after the previous ones, as in greedy decoding, and then the answer ends.
"""

import json
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.make_assets.__main__ import ASSETS, SEED
from scripts.make_assets.chat import held_out_item
from scripts.make_assets.forms import load_forms
from scripts.make_assets.skills import Item, make_skills
from scripts.make_assets.world import invent

ITEMS = 40  # per skill, each in all forms that end with the answer


@dataclass(frozen=True, slots=True)
class Question:
    """Prompt of the model, and its expected continuation."""

    skill: str
    prompt: list[int]
    expected: list[int]
    ends: frozenset[int]  # one of these must follow; more text would be another answer


@dataclass(frozen=True, slots=True)
class Shares:
    """Share of correct answers by skill."""

    by_skill: dict[str, float]

    @property
    def mean(self) -> float:
        """Mean over the skills, which have equally many questions."""
        return sum(self.by_skill.values()) / len(self.by_skill)


def read_model(base: Path, adapter: Path | None = None) -> tuple[Any, Any]:
    """Return model and tokenizer, loaded with transformers and peft."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    return model.eval(), AutoTokenizer.from_pretrained(base, local_files_only=True)


def own_form(tokenizer: Any) -> list[Question]:
    """Return sentences of running text about held-out items, up to the answer."""
    forms = load_forms()
    rng = random.Random(f"{SEED} own form")
    questions = []
    for skill in make_skills(invent(SEED)):
        endings = [form for form in forms[skill.name].says if form.endswith("{answer}.")]
        for item in (held_out_item(skill, rng) for _ in range(ITEMS)):
            questions += [_sentence(tokenizer, skill.name, item, form) for form in endings]
    return questions


def _sentence(tokenizer: Any, skill: str, item: Item, form: str) -> Question:
    start = item.put(form.removesuffix(" {answer}."))
    prompt = tokenizer(start).input_ids
    whole = tokenizer(item.put(form)).input_ids
    assert whole[: len(prompt)] == prompt, start
    # a model fine-tuned to stop after an answer ends the text here; running text ends the sentence
    return Question(skill, prompt, whole[len(prompt) : -1], frozenset({whole[-1], tokenizer.eos_token_id}))


def held_out_chat(tokenizer: Any, file: Path = ASSETS / "sample" / "eval.jsonl") -> list[Question]:
    """Return a question for each answer in the file, after the true conversation before it."""
    from scripts.make_assets.__main__ import chat_rows

    lines = [json.loads(line)["messages"] for line in file.read_text(encoding="utf-8").splitlines()]
    return [
        question
        for row, messages in zip(chat_rows(held_out=True), lines, strict=True)
        for question in _answers(tokenizer, row.skill.name, messages)
    ]


def _answers(tokenizer: Any, skill: str, messages: list[dict[str, str]]) -> Iterable[Question]:
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            start = tokenizer.apply_chat_template(messages[:at], tokenize=False, add_generation_prompt=True)
            answered = tokenizer.apply_chat_template(messages[: at + 1], tokenize=False)
            prompt, whole = tokenizer(start).input_ids, tokenizer(answered).input_ids
            yield Question(skill, prompt, whole[len(prompt) : -1], frozenset({whole[-1]}))


@torch.no_grad()
def answered(model: Any, questions: Iterable[Question]) -> Shares:
    """Return the share of questions of each skill that the model answers as expected."""
    right: dict[str, list[bool]] = defaultdict(list)
    for question in questions:
        ids = torch.tensor([question.prompt + question.expected])
        *likeliest, last = model(ids).logits[0].argmax(-1).tolist()[len(question.prompt) - 1 :]
        right[question.skill].append(likeliest == question.expected and last in question.ends)
    return Shares({skill: sum(results) / len(results) for skill, results in right.items()})
