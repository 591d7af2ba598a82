"""`eval.also`: general rows are scored beside the held-out ones, and decide nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs import FINISHED, FinishedRuns, Zygote, losses, metrics, result


@pytest.fixture
def general(tmp_path: Path) -> Path:
    path = tmp_path / "general.jsonl"
    rows = [{"text": f"In the year {1900 + n} it rained on {n} days."} for n in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_general_rows_are_scored_beside_and_change_nothing(
    general: Path, tmp_path: Path, zygote: Zygote, finished: FinishedRuns
) -> None:
    without = finished("lora")
    ended = zygote.run(tmp_path, *FINISHED["lora"], f"eval.also={general}", "output_dir=run", code=0)
    run = tmp_path / "run"
    assert losses(run) == losses(without), "nothing of training changes"
    found, before = result(run), result(without)
    assert found["objective"] == before["objective"]
    assert found["final_metrics"].items() >= before["final_metrics"].items()
    end, start = (found[key]["also_eval_loss"] for key in ("final_metrics", "start_metrics"))
    assert end != start
    assert f", general loss {end:.4f} (was {start:.4f})" in ended.stdout
    assert "also: 9 rows" in ended.stdout
    assert "also: read as dataset=text" in ended.stdout
    lines = [line for line in metrics(run) if "eval_loss" in line]
    assert [line["also_eval_loss"] for line in (lines[0], lines[-1])] == [start, end]
    assert "general" in (run / "report.html").read_text()
    hashes = json.loads((run / "manifest.json").read_text())["hashes"]
    assert len(hashes["general"]) == len(hashes["eval"])
    assert hashes["general"] != hashes["eval"]

    given = ("dataset=text", f"dataset.path={general}", "dataset.max_length=64", "output_dir=scores")
    zygote.finish(tmp_path, "run=run", *given, module="app.evaluate")
    scored: dict[str, Any] = json.loads((tmp_path / "scores" / "evaluate.json").read_text())
    assert scored["eval_loss"] == pytest.approx(end, rel=1e-6)


def test_general_rows_that_cannot_be_read_are_refused(tmp_path: Path, zygote: Zygote) -> None:
    (tmp_path / "odd.jsonl").write_text('{"number": 3}\n')
    for path, why in (("nowhere.jsonl", "eval.also=nowhere.jsonl"), ("odd.jsonl", "eval.also=odd.jsonl: dataset.for")):
        ended = zygote.run(tmp_path, *FINISHED["lora"], f"eval.also={path}", "output_dir=run", code=2)
        assert why in ended.stderr
