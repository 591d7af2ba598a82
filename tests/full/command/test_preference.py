"""recipe=dpo and recipe=kto from the command line: a reference is made once, kept, and never made again from trained
weights.
"""

import math
import shutil
from pathlib import Path

import pytest

from app.config.finished_run import export_config
from app.evaluation.run import prepare_evaluation
from app.exports.verify import reference_of
from tests.harness.runs import SMALL, Zygote, metrics, result

BRIEF = (
    *SMALL,
    "dataset.max_length=48",
    "batching.tokens=96",
    "training.max_steps=6",
    "checkpoint.every=2",
    "eval.at_start=true",
)
COMMAND = (*BRIEF, "recipe=dpo", "optimizer.lr=5e-3")
KTO = (*BRIEF, "recipe=kto", "optimizer.lr=5e-3", "dataset.max_rows=60")
EVALUATION = {"eval_loss", "pair_accuracy", "reward_margin", "exact_match"}


def test_dpo_with_compiled_layers_begins_at_ln_2(zygote: Zygote, tmp_path: Path) -> None:
    """The reference is scored by uncompiled layers, the policy by compiled ones."""
    compiled = ("compile=blocks", "compile.backend=aot_eager", "precision=bf16")
    ended = zygote.finish(tmp_path, *COMMAND, *compiled, "output_dir=compiled")
    assert "layers compiled as 2 graphs" in ended.stdout
    losses = [each["loss"] for each in metrics(tmp_path / "compiled") if "loss" in each]
    assert losses[0] == pytest.approx(math.log(2), abs=4e-3), "rounding in bf16"
    assert result(tmp_path / "compiled")["final_metrics"]["reward_margin"] > 0.05


def test_dpo_begins_at_ln_2_and_goes_on_with_its_reference(zygote: Zygote, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    zygote.finish(tmp_path, *COMMAND, "output_dir=whole")
    first, last = metrics(whole)[0], result(whole)["final_metrics"]
    assert [first["eval_loss"], metrics(whole)[1]["loss"]] == pytest.approx([math.log(2)] * 2, rel=1e-6)
    assert "pair_accuracy" not in first, "each pair is a tie"
    assert last.keys() >= EVALUATION
    assert last["reward_margin"] > 0.05
    assert last["pair_accuracy"] > 0.6

    (kept,) = (tmp_path / "cache" / "app-finetune" / "references").iterdir()
    made = kept.stat().st_mtime_ns
    zygote.finish(tmp_path, *COMMAND, "output_dir=other", "preference.beta=0.5", "training.max_steps=1")
    assert [each.stat().st_mtime_ns for each in kept.parent.iterdir()] == [made], "runs with another beta share it"
    drawn = ("adapter=peft", "adapter.method=C3A", "adapter.fields={block_size: 16}", "training.max_steps=1")
    zygote.finish(tmp_path, *COMMAND, *drawn, "output_dir=drawn")
    assert metrics(tmp_path / "drawn")[0]["eval_loss"] == pytest.approx(math.log(2), rel=1e-6), "it begins elsewhere"
    shutil.rmtree(next(each for each in kept.parent.iterdir() if each != kept))

    zygote.finish(tmp_path, *COMMAND, "output_dir=elsewhere", "resume=whole/checkpoints/step-000004")
    assert result(tmp_path / "elsewhere")["final_metrics"] == last
    assert (tmp_path / "elsewhere" / "reference").is_dir(), "it goes along"

    words = (*COMMAND, "output_dir=elsewhere")
    beta = "preference.beta changed from 0.1 to 0.2. A resumed run keeps its settings."
    zygote.refused(tmp_path, *words, "preference.beta=0.2", "resume=auto", message=beta)
    shutil.rmtree(tmp_path / "elsewhere" / "reference")
    lost = "reference: the folder is missing. The reference of this run cannot be computed again"
    zygote.refused(tmp_path, *words, "resume=auto", message=lost)

    assert "pair accuracy" in zygote.finish(tmp_path, "run=whole", module="app.evaluate").stdout
    exported = export_config([f"run={whole}", "kind=merged", f"to={tmp_path}/out"])
    compared = reference_of(prepare_evaluation(exported, whole, {}, tuned=True, say=lambda _: None))
    assert {*map(len, compared.targets)} != {0}, "of each pair the wanted answer"
    assert compared.loss(compared.logits) == pytest.approx(-last["chosen_log_probability"], rel=0.5)
    other_rows = ("run=whole", "dataset.eval_path=asset:sample/pairs.jsonl.gz")
    message = "the run has no reference for"
    zygote.refused(tmp_path, *other_rows, module="app.evaluate", message=message)


def test_kto_learns_from_labels_against_its_reference(zygote: Zygote, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    zygote.finish(tmp_path, *KTO, "output_dir=whole")
    first, last = metrics(whole)[0], result(whole)["final_metrics"]
    assert [first["eval_loss"], metrics(whole)[1]["loss"]] == pytest.approx([0.5] * 2, rel=1e-6)
    assert last["chosen_reward"] > last["rejected_reward"]
    assert last["reward_margin"] == pytest.approx(last["chosen_reward"] - last["rejected_reward"])
    assert "reward margin" in zygote.finish(tmp_path, "run=whole", module="app.evaluate").stdout
    alone = tmp_path / "alone.jsonl"
    alone.write_text('{"prompt": "Hi", "completion": "Hello", "label": true}\n' * 3)
    rows = ("dataset=preference_label", "dataset.path=alone.jsonl", "dataset.eval_fraction=0", "eval.at_start=false")
    zygote.refused(tmp_path, *KTO, *rows, message="all answers have the same label. Use rows with both")
