"""recipe=kto from the command line: it learns from labelled answers, and goes on with its reference."""

from pathlib import Path

import pytest

from tests.command.test_preference import BRIEF, killed_at_step_3
from tests.harness.runs import Zygote, metrics, result, same_ending

KTO = (*BRIEF, "recipe=kto", "optimizer.lr=5e-3", "dataset.max_rows=60")


def test_kto_learns_from_labels_and_goes_on_with_its_reference(zygote: Zygote, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    zygote.finish(tmp_path, *KTO, "output_dir=whole")
    first, last = metrics(whole)[0], result(whole)["final_metrics"]
    assert [first["eval_loss"], metrics(whole)[1]["loss"]] == pytest.approx([0.5] * 2, rel=1e-6)
    assert last["chosen_reward"] > last["rejected_reward"]
    assert last["reward_margin"] == pytest.approx(last["chosen_reward"] - last["rejected_reward"])
    words = (*KTO, "output_dir=parts")
    killed_at_step_3(zygote, tmp_path, *words)
    zygote.run(tmp_path, *words, "resume=auto", code=0)
    same_ending(whole, parts)
    assert "reward margin" in zygote.finish(tmp_path, "run=parts", module="app.evaluate").stdout
    alone = tmp_path / "alone.jsonl"
    alone.write_text('{"prompt": "Hi", "completion": "Hello", "label": true}\n' * 3)
    rows = ("dataset=preference_label", "dataset.path=alone.jsonl", "dataset.eval_fraction=0", "eval.at_start=false")
    zygote.refused(tmp_path, *KTO, *rows, message="nothing tells wanted answers from unwanted ones. Give rows of both")
