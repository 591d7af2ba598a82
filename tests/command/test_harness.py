"""Tasks of lm-evaluation-harness: what is refused without it, and that it is asked the model of the run."""

import json
from pathlib import Path

import pytest

from app.errors import EnvironmentProblem
from app.evaluation import lm_eval
from app.evaluation.lm_eval import require_harness, scores_of, table, with_earlier_tasks


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
