"""Tasks of lm-evaluation-harness: what is refused without it, and that it is asked the model of the run."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.config.load import compose_run
from app.engine import harness
from app.engine.harness import _numbers, require_harness, table
from app.errors import EnvironmentProblem
from tests.command.test_resume import SMALL
from tests.command.test_wrong_inputs import refused
from tests.conftest import RunApp

FEW = (*(text for text in SMALL if not text.startswith("eval.")), "eval.samples=0", "training.max_steps=4")


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "find_spec", lambda _name: None)
    with pytest.raises(
        EnvironmentProblem, match=r"harness=arc_easy,piqa needs .* pip install 'lm_eval>=0.4.13,<0.5'"
    ):
        require_harness(["arc_easy", "piqa"])


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(EnvironmentProblem, match="start it without torchrun or srun"):
        require_harness(["arc_easy"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ("harness=a,b", "dataset.path=new.jsonl"),
            "dataset.path would change nothing: the tasks of harness=",
        ),
        (("harness=[a]", "batching.packing=false", "launch.num_processes=2"), "Leave them out."),
        (("harness_limit=5",), "there are none. Give harness=TASK."),
        (("harness=a", "harness_limit=0"), "harness_limit=0 must be at least 1"),
        (("harnes=a",), "harnes is not a key. Did you mean harness?"),
    ],
)
def test_what_would_change_nothing_is_refused(
    run_app: RunApp, tmp_path: Path, given: tuple[str, ...], message: str
) -> None:
    (tmp_path / "run" / "final").mkdir(parents=True)
    (tmp_path / "run" / "run.yaml").write_text(yaml.safe_dump(asdict(compose_run([]))))
    ended = run_app("run=run", *given, module="app.evaluate")
    refused(ended.returncode, ended.stdout, ended.stderr, message)


def test_numbers_are_read_by_metric_and_filter() -> None:
    told = {
        "alias": "a",
        "sample_len": 20,
        "acc,none": 0.5,
        "acc_stderr,none": 0.1,
        "exact_match,strict-match": 1,
        "exact_match_stderr,strict-match": "N/A",
        "f1,none": float("nan"),
    }
    figures = _numbers(told)
    assert figures == {"acc": 0.5, "acc_stderr": 0.1, "exact_match strict-match": 1.0}
    shown = table({"tuned": {"a": figures}, "base": {"a": {"acc": 0.25}}}).splitlines()
    assert [line.split() for line in shown] == [
        ["base", "tuned"],
        ["a", "acc", "0.2500", "0.5000", "+-", "0.1000"],
    ]


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
    (folder / "choose.yaml").write_text(
        yaml.safe_dump(
            {
                **common,
                "task": "choose",
                "output_type": "multiple_choice",
                "doc_to_choice": "choices",
                "doc_to_target": "answer",
                "metric_list": [{"metric": "acc"}],
            }
        )
    )
    (folder / "write.yaml").write_text(
        yaml.safe_dump(
            {
                **common,
                "task": "write",
                "output_type": "generate_until",
                "doc_to_target": "{{choices[answer]}}",
                "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "do_sample": False},
                "metric_list": [{"metric": "exact_match"}],
            }
        )
    )


def share_chosen(run: Path, *, adapter: bool) -> float:
    """How often the likeliest choice is the right one, in plain transformers."""
    import torch

    from app.config.load import read_run
    from app.model.load import load_tuned, load_tuned_tokenizer
    from app.model.tasks import TASKS

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
