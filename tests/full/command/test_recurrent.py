"""Runs of models with recurrent mixers: killed and resumed, and divided among processes."""

from pathlib import Path

import pytest

from tests.command.test_processes import PLAIN, with_rate
from tests.harness.runs import SMALL, Zygote, killed_and_resumed, result, same_ending, same_numbers, tensors
from tests.memory.truth import DELTA_RULE, STATE_SPACE
from tests.model.small import distance

HYBRIDS = {"qwen3_5_text": DELTA_RULE, "bamba": (*STATE_SPACE, "+model.architecture.mamba_expand=4")}


@pytest.mark.parametrize(("kind", "recipe"), [("qwen3_5_text", "qlora"), ("bamba", "full")])
def test_killed_run_of_hybrid_resumes_bit_for_bit(kind: str, recipe: str, zygote: Zygote, tmp_path: Path) -> None:
    command = (*SMALL, *HYBRIDS[kind], f"recipe={recipe}", "training.recompute=1", "training.max_steps=9")
    whole, killed = killed_and_resumed(zygote, tmp_path, tmp_path, *command, at=[4])
    same_ending(whole, killed)
    zygote.run(tmp_path, f"run={whole}", "weights=both", module="app.evaluate", code=0)  # packed, and answers
    assert result(whole)["final_metrics"]["eval_loss"] < result(whole)["start_metrics"]["eval_loss"]


@pytest.mark.parametrize(("kind", "recipe"), [("qwen3_5_text", "full"), ("bamba", "lora")])
def test_fsdp_two_processes_give_numbers_of_one_hybrid(kind: str, recipe: str, zygote: Zygote, tmp_path: Path) -> None:
    plain = tuple(text.replace("lr=0.5", "lr=0.05") for text in PLAIN)
    command = (*SMALL, *HYBRIDS[kind], *plain, f"recipe={recipe}", "dataset.eval_max_rows=2", "training.max_steps=3")
    one, two = tmp_path / "one", tmp_path / "two"
    zygote.run(tmp_path, *command, with_rate(1), f"output_dir={one}", code=0)
    zygote.run_together(tmp_path, 2, *command, "parallel=fsdp", with_rate(2), f"output_dir={two}", code=0)
    same_numbers(one, two)
    left, right = tensors(one), tensors(two)
    assert left.keys() == right.keys()
    assert distance(right, left) <= 1e-6
