"""recipe=dpo from the command line: its reference is made once, kept, and never made again from trained weights."""

import math
import shutil
from pathlib import Path

import pytest

from tests.harness.runs import SMALL, Zygote, metrics, result, same_ending

COMMAND = (
    *SMALL,
    "recipe=dpo",
    "optimizer.lr=5e-3",
    "dataset.max_length=48",
    "batching.tokens=96",
    "training.max_steps=6",
)
EVALUATION = {"eval_loss", "pair_accuracy", "reward_margin", "exact_match"}


def test_dpo_begins_at_ln_2_and_goes_on_with_its_reference(zygote: Zygote, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    zygote.finish(tmp_path, *COMMAND, "output_dir=whole", "eval.at_start=true")
    first, last = metrics(whole)[0], result(whole)["final_metrics"]
    assert [first["eval_loss"], metrics(whole)[1]["loss"]] == pytest.approx([math.log(2)] * 2, rel=1e-6)
    assert "pair_accuracy" not in first, "each pair is a tie"
    assert last.keys() >= EVALUATION
    assert last["reward_margin"] > 0.05
    assert last["pair_accuracy"] > 0.6

    (kept,) = (tmp_path / "cache" / "app-finetune" / "references").iterdir()
    zygote.run(tmp_path, *COMMAND, "output_dir=parts", "eval.at_start=true", "training.stop_after=3", code=75)
    shutil.rmtree(kept.parent)  # the reference of a run is its own
    zygote.run(tmp_path, *COMMAND, "output_dir=parts", "eval.at_start=true", "resume=auto", code=0)
    same_ending(whole, parts)
    assert not kept.exists()

    zygote.refused(
        tmp_path,
        *COMMAND,
        "output_dir=parts",
        "preference.beta=0.2",
        "resume=auto",
        message="preference.beta: the checkpoint has 0.1, this run has 0.2",
    )
    shutil.rmtree(parts / "reference")
    zygote.refused(
        tmp_path,
        *COMMAND,
        "output_dir=parts",
        "resume=auto",
        message="the reference of this run cannot be used (it is not there), and the model has been trained since",
    )


def test_reference_is_shared_by_runs_with_another_beta(zygote: Zygote, tmp_path: Path) -> None:
    references = tmp_path / "cache" / "app-finetune" / "references"
    zygote.finish(tmp_path, *COMMAND, "training.max_steps=1", "output_dir=one")
    (kept,) = references.iterdir()
    made = kept.stat().st_mtime_ns
    zygote.finish(tmp_path, *COMMAND, "training.max_steps=1", "output_dir=two", "preference.beta=0.5")
    assert [each.stat().st_mtime_ns for each in references.iterdir()] == [made]
    evaluated = zygote.finish(tmp_path, "run=two", module="app.evaluate").stdout
    assert "pair accuracy" in evaluated
    zygote.refused(
        tmp_path,
        "run=two",
        "dataset.eval_path=asset:sample/pairs.jsonl",
        module="app.evaluate",
        message="of these rows the run has no reference for",
    )


KTO = (*COMMAND[:-4], "recipe=kto", *COMMAND[-3:], "dataset.max_rows=60", "dataset.eval_max_rows=12")


def test_kto_learns_from_labels_and_goes_on_with_its_reference(zygote: Zygote, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    zygote.finish(tmp_path, *KTO, "output_dir=whole", "eval.at_start=true")
    first, last = metrics(whole)[0], result(whole)["final_metrics"]
    assert [first["eval_loss"], metrics(whole)[1]["loss"]] == pytest.approx([0.5] * 2, rel=1e-6)
    assert last["chosen_reward"] > last["rejected_reward"]
    assert last["reward_margin"] == pytest.approx(last["chosen_reward"] - last["rejected_reward"])
    words = (*KTO, "output_dir=parts", "eval.at_start=true")
    zygote.run(tmp_path, *words, "training.stop_after=3", code=75)
    zygote.run(tmp_path, *words, "resume=auto", code=0)
    same_ending(whole, parts)
    assert "reward margin" in zygote.finish(tmp_path, "run=parts", module="app.evaluate").stdout
    alone = tmp_path / "alone.jsonl"
    alone.write_text('{"prompt": "Hi", "completion": "Hello", "label": true}\n' * 3)
    rows = ("dataset=preference_label", "dataset.path=alone.jsonl", "dataset.eval_fraction=0")
    zygote.refused(tmp_path, *KTO, *rows, message="nothing tells wanted answers from unwanted ones. Give rows of both")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("recipe=kto", "task=preference"), "preference=kto with task=preference"),
        (("recipe=kto", "preference.sft=1"), "preference=kto does not read it"),
        (("recipe=kto", "dataset=pairs"), "from such rows recipe=dpo or recipe=orpo or recipe=simpo learns"),
        (("recipe=dpo", "dataset=labelled_answers"), "from such rows recipe=kto learns"),
        (("recipe=dpo", "task=causal"), "preference=dpo with task=causal"),
        (("task=preference", "dataset=pairs"), "preference=none with task=preference"),
        (("recipe=dpo", "adapter.dropout=0.1"), "the reference is without it"),
        (("recipe=orpo", "preference.gamma=1"), "preference=orpo does not read it"),
        (("recipe=dpo", "dataset.max_length=200"), "a pair of answers has up to twice as many tokens"),
        (("recipe=dpo", "dataset=sample"), "task=preference learns from pairs"),
        (("dataset=preference", "dataset.path=x"), "from such rows recipe=dpo or recipe=orpo or recipe=simpo learns"),
    ],
)
def test_settings_that_compare_nothing_are_refused(
    words: tuple[str, ...], message: str, zygote: Zygote, tmp_path: Path
) -> None:
    zygote.refused(tmp_path, *words, message=message)
