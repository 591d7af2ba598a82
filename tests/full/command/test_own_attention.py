"""A run of a model that keeps its own attention, in padded rows."""

from pathlib import Path

import yaml

from tests.harness.runs import SMALL, Zygote, killed_and_resumed, result, same_ending


def test_killed_run_with_own_attention_resumes_bit_for_bit_and_is_exported(
    quick_zygote: Zygote, tmp_path: Path
) -> None:
    command = (*SMALL, "model.architecture.model_type=bloom", "recipe=lora", "training.max_steps=9")
    whole, killed = killed_and_resumed(quick_zygote, tmp_path, tmp_path, *command, at=[4])
    same_ending(whole, killed)
    assert yaml.safe_load((whole / "run.yaml").read_text("utf-8"))["batching"]["packing"] is False
    assert result(whole)["final_metrics"]["eval_loss"] < result(whole)["start_metrics"]["eval_loss"]
    quick_zygote.run(tmp_path, f"run={whole}", "weights=both", module="app.evaluate", code=0)
    quick_zygote.run(tmp_path, f"run={whole}", "kind=merged", f"to={tmp_path / 'out'}", module="app.export", code=0)
