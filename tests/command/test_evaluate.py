"""Scores of a finished run, and tasks of lm-evaluation-harness."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.assets import ROOT
from app.errors import EnvironmentProblem
from app.evaluation import lm_eval
from app.evaluation.lm_eval import require_harness, scores_of, table, with_earlier_tasks
from tests.harness.runs import Ended, FinishedRuns, Zygote, content_of, metrics

FIGURES = ["eval_loss", "perplexity", "token_accuracy", "exact_match"]
# turns of the assistant in the held-out rows that SMALL takes
ANSWERS = sum(
    turn["role"] == "assistant"
    for line in (ROOT / "sample" / "eval.jsonl").read_text().splitlines()[:12]
    for turn in json.loads(line)["messages"]
)
KEYS = [*FIGURES, *(f"{key}_interval" for key in FIGURES)]


def score(zygote: Zygote, folder: Path, run: Path, *given: str) -> tuple[dict[str, Any], Ended]:
    ended = zygote.finish(folder, f"run={run}", "output_dir=scores", *given, module="app.evaluate")
    scores: dict[str, Any] = json.loads((folder / "scores" / "evaluate.json").read_text())
    return scores, ended


def last_evaluation(run: Path) -> dict[str, float]:
    return [line for line in metrics(run) if "eval_loss" in line][-1]


def scored_both(zygote: Zygote, finished: FinishedRuns, folder: Path, recipe: str) -> tuple[Path, dict[str, Any], str]:
    """The run, its scores with and without what was trained, and what was printed; no other file changes."""
    run = finished.copy(folder / "run", recipe)
    before = content_of(run)
    ended = zygote.finish(folder, f"run={run}", "weights=both", module="app.evaluate")
    after = content_of(run)
    scores = json.loads(after.pop("evaluate.json"))
    assert after == before
    return run, scores, ended.stdout


def expected_of(run: Path, scores: dict[str, Any], base_loss: float, near: float = 1e-6) -> dict[str, Any]:
    """What the run's last evaluation, and the scores themselves, say of some of them."""
    last = last_evaluation(run)
    loss = pytest.approx(last["eval_loss"], rel=1e-6)
    return {
        "eval_loss": scores["tuned_eval_loss"],
        "tuned_eval_loss": loss,
        **dict.fromkeys(("exact_match", "tuned_exact_match"), last["exact_match"]),
        "base_eval_loss": pytest.approx(base_loss, rel=near),
        **{f"difference_{key}": scores[f"tuned_{key}"] - scores[f"base_{key}"] for key in FIGURES},
        "rows": 12,
        "trained_tokens": 45,
        "answers": ANSWERS,
        "rows_are": "held_out",
    }


def outside_intervals(scores: dict[str, Any]) -> list[str]:
    names = [f"{side}_{key}" for key in FIGURES for side in ("tuned", "base", "difference")]
    intervals = {name: scores[f"{name}_interval"] for name in names}
    return [name for name, (low, high) in intervals.items() if not (low <= scores[name] <= high and low < high)]


def test_evaluate_equals_last_evaluation_of_the_run(zygote: Zygote, finished: FinishedRuns, tmp_path: Path) -> None:
    run, scores, printed = scored_both(zygote, finished, tmp_path, "lora")
    # one seed draws one base: kept beside an adapter, drawn again for a whole model
    base, _ = score(zygote, tmp_path, finished("full"), "weights=base")
    expected = expected_of(run, scores, base["eval_loss"])
    assert {key: scores[key] for key in expected} == expected
    assert outside_intervals(scores) == []
    assert scores["tuned_token_accuracy"] > scores["base_token_accuracy"]
    assert list(scores)[: 4 * len(KEYS)] == [
        f"{side}{key}" for side in ("", "tuned_", "base_", "difference_") for key in KEYS
    ]
    assert "this is the eval set of the run" in printed
    assert f"tuned   loss {scores['eval_loss']:.4f}\n" in printed
    heading, loss, *_ = printed.splitlines()[-7:]
    assert heading.split() == ["base", "tuned", "difference"]
    assert loss.startswith(f"loss             {scores['base_eval_loss']:.4f} [")
    assert f"written {run / 'evaluate.json'}" in printed


def test_evaluate_other_rows_keeps_the_scores_of_the_run(
    zygote: Zygote, finished: FinishedRuns, tmp_path: Path
) -> None:
    run = finished.copy(tmp_path / "run")
    (run / "evaluate.json").write_text('{"rows": 12}')
    lines = (ROOT / "sample" / "train.jsonl").read_text().splitlines()[:3]
    (tmp_path / "new.jsonl").write_text("\n".join(lines))
    ended = zygote.finish(tmp_path, f"run={run}", "dataset.path=new.jsonl", module="app.evaluate")
    assert (run / "evaluate.json").read_text() == '{"rows": 12}'
    (file,) = run.glob("evaluate-new-*.json")
    assert f"written {file}" in ended.stdout
    scores = json.loads(file.read_text())
    assert (scores["rows"], scores["rows_are"], scores["dataset"]) == (3, "other", "new.jsonl")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("run=run", "dataset.path=nw.jsonl"), "dataset.path=nw.jsonl: no such file or folder in "),
        (("run=run", "dataset.eval_path=nw.jsonl"), "dataset.eval_path=nw.jsonl: no such file or folder in "),
        (("run=run", "model.chat_template=chatmll"), "model.chat_template=chatmll is neither a file nor one of "),
        (("run=run", "output_dir=run/run.yaml"), "output_dir: cannot write run/run.yaml"),
    ],
)
def test_evaluate_errors_come_before_loading(
    zygote: Zygote, finished: FinishedRuns, tmp_path: Path, given: tuple[str, ...], message: str
) -> None:
    before = content_of(finished.copy(tmp_path / "run"))
    ended = zygote.refused(tmp_path, *given, module="app.evaluate", message=message)
    assert ended.stdout == ""
    assert content_of(tmp_path / "run") == before


def test_harness_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_eval, "find_spec", lambda _name: None)
    with pytest.raises(EnvironmentProblem, match=r"harness=arc_easy,piqa needs .* pip install 'lm_eval>=0.4.13,<0.5'"):
        require_harness(["arc_easy", "piqa"])


def test_harness_refuses_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(EnvironmentProblem, match="start it without torchrun or srun"):
        require_harness(["arc_easy"])


def test_harness_metrics_have_plain_names() -> None:
    told = {
        "alias": "a",
        "sample_len": 20,
        "acc,none": 0.5,
        "acc_stderr,none": 0.1,
        "exact_match,strict-match": 1,
        "exact_match_stderr,strict-match": "N/A",
        "f1,none": float("nan"),
    }
    figures = scores_of(told)
    assert figures == {"acc": 0.5, "acc_stderr": 0.1, "exact_match strict-match": 1.0}
    shown = table({"tuned": {"a": figures}, "base": {"a": {"acc": 0.25}}}).splitlines()
    assert [line.split() for line in shown] == [["base", "tuned"], ["a", "acc", "0.2500", "0.5000", "+-", "0.1000"]]


def test_harness_results_keep_other_tasks_of_same_settings(tmp_path: Path) -> None:
    file, facts = tmp_path / "harness.json", {"limit": 9}
    new = {"tuned": {"b": {"acc": 0.5}}}
    assert with_earlier_tasks(new, facts, file) == new
    file.write_text(json.dumps({"tuned": {"a": {"acc": 1.0}, "b": {"acc": 0.1}}, "base": {"a": {"acc": 0.2}}, **facts}))
    kept = {"tuned": {"a": {"acc": 1.0}, "b": {"acc": 0.5}}, "base": {"a": {"acc": 0.2}}}
    assert with_earlier_tasks(new, facts, file) == kept
    assert with_earlier_tasks(new, {"limit": None}, file) == new
