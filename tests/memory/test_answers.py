"""Planned memory of answers against the bytes of a real model that answers."""

from functools import cache
from typing import Any

import pytest
import torch

from app.adapters.adapters import add_adapter
from app.config.commands import AnswersConfig
from app.config.tasks import TASKS
from app.layers.attention import own_attention
from app.memory.check import check_memory, plan_answers
from app.memory.estimate import machine_of
from app.memory.planner import Planned, Planner
from app.model.build import random_base
from app.training.auto_settings import Choices, sections_of
from app.training.storage_counter import StorageCounter
from tests.memory.facts import gpu
from tests.memory.truth import ONE_LAYER, small_run

LENGTH = 40
NEAR = 4096  # bytes of what generate notes: which rows have ended, and the sequences of a search


def real_model(*words: str) -> Any:
    run = small_run(*words)
    sections = sections_of(run, Choices("fp32", "sdpa"))
    lm = random_base(sections, torch.device("cpu"), seed=0)
    add_adapter(sections.adapter, TASKS["causal"], lm, "nowhere")
    lm.set_attn_implementation(own_attention(lm))
    return lm.eval()


@cache
def planned(recipe: str) -> Planned:
    return Planner(machine_of(None)).at(small_run(f"recipe={recipe}"))


@pytest.mark.parametrize(("recipe", "rows", "beams"), [("full", 1, 1), ("lora", 3, 1), ("lora", 2, 3)])
def test_planned_answers_equal_counted(recipe: str, rows: int, beams: int) -> None:
    asked = AnswersConfig(rows=rows, length=LENGTH, beams=beams)
    parts = plan_answers(planned(recipe), asked, machine_of(None))["anatomy"]
    lm = real_model(f"recipe={recipe}")
    ids = torch.randint(2, 1024, (rows, LENGTH))
    counter = StorageCounter()
    counter.hold("weights", [*lm.parameters(), *lm.buffers()])
    assert counter.current == parts["weights"]
    mask = torch.ones_like(ids)
    mask[0, 0] = int(rows == 1)
    with torch.no_grad(), counter:
        out = lm.generate(
            ids, attention_mask=mask, max_new_tokens=1, num_beams=beams, do_sample=False,
            return_dict_in_generate=True, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    cache = sum(each.keys.nbytes + each.values.nbytes for each in out.past_key_values.layers)
    layers, heads, size, of_fp32 = 3, 2, 32, 4
    assert parts["cache"] == cache == rows * beams * LENGTH * layers * 2 * heads * size * of_fp32
    assert 0 <= counter.peak - sum(parts.values()) <= NEAR * (1 if beams == 1 else 4)


def test_answers_stand_beside_the_plan_of_the_run() -> None:
    words = ("recipe=qlora", "precision=bf16", "compile=none", ONE_LAYER)
    run, hardware = small_run(*words), gpu("h100")
    asked = AnswersConfig(rows=2, beams=2)
    facts = check_memory(run, (), hardware, answers=asked)
    answers, plain = facts.pop("answers"), check_memory(run, (), hardware)
    assert facts == plain
    assert (answers["rows"], answers["length"], answers["beams"]) == (2, run.dataset.max_length, 2)
    assert answers["anatomy"]["cache"] == 2 * 2 * 256 * 2 * 2 * 32 * 2
    assert sum(answers["anatomy"].values()) < answers["needed_bytes"] < facts["memory_bytes"]
    assert answers["fits"]
    small = gpu("h100", memory_gib=0.8)
    assert not plan_answers(Planner(machine_of(small)).at(run), asked, machine_of(small))["fits"]


def test_answers_end_at_the_last_position() -> None:
    facts = plan_answers(planned("lora"), AnswersConfig(length=600), machine_of(None))
    assert facts["length"] == 512
