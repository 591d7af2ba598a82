"""Scores of a finished run, and tasks of lm-evaluation-harness."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.assets import ROOT
from tests.command.test_evaluate import KEYS, expected_of, last_evaluation, outside_intervals, score, scored_both
from tests.conftest import RunApp
from tests.harness.marks import requires_lm_eval
from tests.harness.runs import SMALL, FinishedRuns, Zygote


def test_evaluate_does_not_depend_on_batches_or_processes(
    zygote: Zygote, finished: FinishedRuns, tmp_path: Path
) -> None:
    run = finished("lora")
    plain, _ = score(zygote, tmp_path, run)
    assert set(KEYS) < plain.keys()
    assert not [key for key in plain if key.startswith(("tuned_", "base_"))]
    rows = (ROOT / "sample" / "eval.jsonl").read_text().splitlines(keepends=True)[:12]
    random.Random(0).shuffle(rows)
    (tmp_path / "shuffled.jsonl").write_text("".join(rows))
    ways = [
        ("batching.packing=false", "eval.rows=1"),
        ("batching.packing=false", "eval.rows=7"),
        ("batching.tokens=200",),
        ("dataset.path=shuffled.jsonl", "launch.threads=2"),
    ]
    for way in ways:
        scores, _ = score(zygote, tmp_path, run, *way)
        same_numbers(scores, plain)
    same_numbers(by_two_processes(zygote, tmp_path, run), plain)


def same_numbers(scores: dict[str, Any], expected: dict[str, Any]) -> None:
    assert scores["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)
    assert scores["token_accuracy"] == expected["token_accuracy"] > 0
    assert scores["exact_match"] == expected["exact_match"]
    for key in KEYS:
        assert scores[key] == pytest.approx(expected[key], rel=1e-5)
    assert (scores["rows"], scores["answers"]) == (expected["rows"], expected["answers"])


def by_two_processes(zygote: Zygote, folder: Path, run: Path) -> dict[str, Any]:
    """The first one speaks and writes."""
    first, second = zygote.run_together(
        folder, 2, f"run={run}", "output_dir=scores", "batching.tokens=64", module="app.evaluate"
    )
    assert (first.code, first.stderr, second.code, second.stderr) == (0, "", 0, "")
    assert "[95% intervals: 2,000 resamples of 12 rows]" in first.stdout
    assert second.stdout == ""
    scores: dict[str, Any] = json.loads((folder / "scores" / "evaluate.json").read_text())
    return scores


def test_evaluate_scores_another_dataset_whole(zygote: Zygote, finished: FinishedRuns, tmp_path: Path) -> None:
    rows = [{"prompt": f"Say {n}.", "completion": f" {n}"} for n in range(20)]
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ("dataset=prompt_completion", "dataset.path=new.jsonl", "dataset.max_length=64")
    scores, ended = score(zygote, tmp_path, finished("lora"), *given, "weights=base", "precision=bf16")
    assert "these are all rows of new.jsonl (no eval split)" in ended.stdout
    assert (scores["rows"], scores["rows_are"], scores["dataset"]) == (20, "other", "new.jsonl")
    assert (scores["weights"], scores["precision"]) == ("base", "bf16")
    assert (scores["answers"], scores["exact_match"]) == (20, 0.0)
    (tmp_path / "book.txt").write_text("One line after another.\n" * 200)
    given = ("dataset=text", "dataset.path=book.txt", "dataset.max_length=64")
    scores, ended = score(zygote, tmp_path, finished("lora"), *given)
    assert (scores["answers"], scores["exact_match"], scores["exact_match_interval"]) == (0, None, None)
    assert "exact match" not in ended.stdout
    _, ended = score(zygote, tmp_path, finished("lora"), "dataset=sample", "dataset.max_length=64", "eval.rows=9")
    assert "these rows are not the eval set of the run" in ended.stdout
    own = ("dataset.eval_path=asset:sample/train.jsonl", "dataset.eval_max_rows=90")
    scores, ended = score(zygote, tmp_path, finished("lora"), *own)
    assert "the run was trained on these rows" in ended.stdout
    assert scores["rows_are"] == "trained_on"


def test_evaluate_accepts_only_the_tuned_base(zygote: Zygote, tmp_path: Path) -> None:
    """Its base may lie elsewhere now; other weights would give a number too, but not that of the run."""
    zygote.run(tmp_path, *SMALL, "recipe=full", "training.max_steps=1", "output_dir=first", code=0)
    shutil.copytree(tmp_path / "first" / "final", tmp_path / "model")
    (tmp_path / "model" / "manifest.json").unlink()  # without checksums its hash in the manifest of the run decides
    few = ("dataset.max_rows=40", "dataset.eval_max_rows=5", "training.max_steps=2", "launch.threads=1")
    zygote.run(tmp_path, *few, "precision=fp32", "model.path=model", "eval.samples=0", "output_dir=run", code=0)
    (tmp_path / "model").rename(tmp_path / "moved")
    scores, _ = score(zygote, tmp_path, tmp_path / "run", "model.path=moved")
    assert scores["eval_loss"] == pytest.approx(last_evaluation(tmp_path / "run")["eval_loss"], rel=1e-6)

    weights = tmp_path / "moved" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    said = "model.path=moved: these weights are not the base of run="
    zygote.refused(tmp_path, f"run={tmp_path / 'run'}", "model.path=moved", module="app.evaluate", message=said)
    assert not (tmp_path / "run" / "evaluate.json").exists()


@pytest.mark.parametrize(("recipe", "same_base", "near"), [("qlora in fp32", "full", 5e-2), ("full", "lora", 1e-6)])
def test_evaluate_equals_last_evaluation_of_the_run(
    zygote: Zygote, finished: FinishedRuns, tmp_path: Path, recipe: str, same_base: str, near: float
) -> None:
    """In four bits the base is only near the one that it was made of."""
    run, scores, _ = scored_both(zygote, finished, tmp_path, recipe)
    base, _ = score(zygote, tmp_path, finished(same_base), "weights=base")
    expected = expected_of(run, scores, base["eval_loss"], near)
    assert {key: scores[key] for key in expected} == expected
    assert outside_intervals(scores) == []
    assert scores["tuned_token_accuracy"] > scores["base_token_accuracy"]


QUESTIONS = [
    ("Name the opposite of new.", ["old", "ancient", "tighten", "grey"], 0),
    ("Write shirt in capitals.", ["SHIRT", "Shirt", "green", "box"], 0),
    ("Add one and two.", ["four", "three", "five", "nine"], 1),
    ("Who?", ["you", "me", "they", "a cat"], 2),
    ("Tell me the colour of Osimo.", ["white", "red", "grey", "blue"], 2),
    ("Spell box.", ["b-o-x", "box", "c-a-t", "bo"], 0),
]


def write_tasks(folder: Path) -> None:
    rows = [{"question": q, "choices": c, "answer": a} for q, c, a in QUESTIONS]
    (folder / "rows.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.json")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choose = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer"}
    write = {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "do_sample": False},
    }
    for name, more, metric in (("choose", choose, "acc"), ("write", write, "exact_match")):
        task = {**common, "task": name, **more, "metric_list": [{"metric": metric}]}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


def share_chosen(run: Path, *, adapter: bool) -> float:
    """How often the likeliest choice is the right one, in plain transformers."""
    import torch

    from app.config.load import read_run
    from app.config.tasks import TASKS
    from app.finished.inference import load_tuned, load_tuned_tokenizer

    tokenizer = load_tuned_tokenizer(run / "final")
    lm: Any = load_tuned(run, read_run(run / "run.yaml").model, TASKS["causal"], adapter=adapter)
    right = 0
    for question, choices, answer in QUESTIONS:
        asked = len(tokenizer(question).input_ids)
        told = []
        for choice in choices:
            ids = torch.tensor([tokenizer(f"{question} {choice}").input_ids])
            with torch.no_grad():
                logs = lm(ids).logits[0, :-1].log_softmax(-1)
            told.append(float(logs.gather(1, ids[0, 1:, None])[asked - 1 :].sum()))
        right += told.index(max(told)) == answer
    return right / len(QUESTIONS)


@requires_lm_eval
def test_harness_scores_run_and_base(finished: FinishedRuns, run_app: RunApp, tmp_path: Path) -> None:
    finished.copy(tmp_path / "run")
    write_tasks(tmp_path)
    done = run_app(
        "run=run", "harness=choose.yaml,write.yaml", "weights=both", module="app.evaluate", timeout=300, code=0
    )
    found = json.loads((tmp_path / "run" / "harness.json").read_text())
    for side, adapter in (("tuned", True), ("base", False)):
        assert found[side]["choose"]["acc"] == pytest.approx(share_chosen(tmp_path / "run", adapter=adapter))
        assert 0.0 <= found[side]["write"]["exact_match"] <= 1.0
    assert found["tuned"] != found["base"]
    assert (found["limit"], found["chat"], found["run"]) == (None, False, "run")
    assert "choose" in done.stdout

    unknown = run_app("run=run", "harness=hellaswg", module="app.evaluate", timeout=300, code=2)
    assert "harness=hellaswg: unknown task, and no such file. Did you mean hellaswag?" in unknown.stderr
    offline = run_app("run=run", "harness=arc_easy", module="app.evaluate", timeout=300, code=2)
    assert "harness=arc_easy: could not read the rows of a task" in offline.stderr
