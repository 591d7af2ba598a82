"""Runs of models with other mixers than packed attention: scored, exported, and divided among processes."""

from pathlib import Path

import pytest
import yaml

from tests.command.test_processes import PLAIN, with_rate
from tests.harness.runs import SMALL, Zygote, result, same_numbers, tensors
from tests.memory.truth import DELTA_RULE, STATE_SPACE
from tests.model.small import distance

HYBRIDS = {"qwen3_5_text": DELTA_RULE, "bamba": (*STATE_SPACE, "+model.architecture.mamba_expand=4")}


@pytest.mark.parametrize(("kind", "recipe"), [("qwen3_5_text", "qlora"), ("bamba", "full"), ("bloom", "lora")])
def test_run_learns_and_is_scored(kind: str, recipe: str, quick_zygote: Zygote, tmp_path: Path) -> None:
    model = HYBRIDS.get(kind, (f"model.architecture.model_type={kind}",))
    words = (*model, f"recipe={recipe}", "training.recompute=1", "training.max_steps=9", "output_dir=run")
    quick_zygote.run(tmp_path, *SMALL, *words, code=0)
    run = tmp_path / "run"
    assert result(run)["final_metrics"]["eval_loss"] < result(run)["start_metrics"]["eval_loss"]
    quick_zygote.run(tmp_path, "run=run", "weights=both", module="app.evaluate", code=0)  # packed, and answers
    if kind == "bloom":  # which keeps its own attention, in padded rows
        assert yaml.safe_load((run / "run.yaml").read_text("utf-8"))["batching"]["packing"] is False
        quick_zygote.run(tmp_path, "run=run", "kind=merged", "to=out", module="app.export", code=0)


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
