"""Tasks of lm-evaluation-harness: what is refused without it, and that it is asked the model of the run."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import RunApp
from tests.harness.marks import requires_lm_eval
from tests.harness.runs import FinishedRuns

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
    assert "harness=hellaswg: there is no such task and no such file. Did you mean hellaswag?" in unknown.stderr
    offline = run_app("run=run", "harness=arc_easy", module="app.evaluate", timeout=300, code=2)
    assert "harness=arc_easy: the rows of a task cannot be read" in offline.stderr
