"""Pages as the program writes them: at the end of runs and sweeps, and when they are asked for."""

import json
import re
from pathlib import Path

import pytest

from app.config.commands import REPORT
from app.errors import CheckpointError
from app.pages.page import Page, Table, TrainingSamples, as_text, write_page
from app.pages.run_page import run_page
from app.report import report
from app.tracking.console import Console
from tests.conftest import RunApp
from tests.harness.runs import SMALL, FinishedRuns, Zygote, metrics
from tests.pages.values import all_of, lines, section

RANDOM = (*SMALL, "model.weights=random", "training.max_steps=4")


def test_run_writes_its_report(finished: FinishedRuns) -> None:
    run = finished()
    page, logged, manifest = run_page(run), metrics(run), json.loads((run / "manifest.json").read_text())
    assert page.badges == [("finished", "good")]
    assert [y for _, y in lines(page, "Loss")["train"]] == [line["loss"] for line in logged if "loss" in line]
    evals = [(line["step"], line["eval_loss"]) for line in logged if "eval_loss" in line]
    assert lines(page, "Loss")["eval"] == evals
    proofs = manifest["proofs"]
    assert len(proofs) == 4, "head, its faster way, packing twice"
    (checks,) = all_of(Table, section(page, "Checks passed"))
    assert [str(badge) for badge, *_ in checks.cells] == ["passed"] * len(proofs)
    assert all(0 <= proof["difference"] <= proof["allowed"] for proof in proofs)
    data = section(page, "Data")
    assert f"{manifest['counts']['fill']:.1%} full." in as_text(data)
    (samples,) = all_of(TrainingSamples, data)
    trained = [text for _, pieces in samples.samples for text, is_trained, _ in pieces if is_trained]
    assert len(trained) >= 4
    assert all(text.endswith("<|end|>") for text in trained)
    assert f"<title>{page.title}</title>" in (run / "report.html").read_text()
    assert "report" in (run / "log.txt").read_text().splitlines()[-1]


def test_report_is_rebuilt_without_torch(finished: FinishedRuns, run_app: RunApp, tmp_path: Path) -> None:
    run = finished()
    ended = run_app(f"run={run}", "to=page.html", module="app.report", env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert (ended.returncode, ended.stdout) == (0, "report  page.html\n")
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "app.pages.run_page" in imported
    assert not {"torch", "numpy", "transformers"} & imported
    # the time of the run ends with its last message, which may come after the page, in the next second
    clocks = r'Created .* by|<div class="tile"><b>[^<]*</b><span>for \S+ steps</span></div>\n'
    first, rebuilt = (re.sub(clocks, "", file.read_text()) for file in (run / "report.html", tmp_path / "page.html"))
    assert rebuilt == first


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("manifest.json", '{"starts": [1]}'),
        ("manifest.json", '{"starts": {"a": "b"}, "counts": []}'),
        ("manifest.json", '{"counts": {"data": 3}, "proofs": [[]]}'),
        ("preview.json", '{"rows": [[]]}'),
        ("preview.json", '{"lengths": 5}'),
        ("samples.jsonl", '{"step": 1, "prompt": ["a"], "expected": {}, "answer": null}\n'),
        ("result.json", '{"state": []}'),
    ],
)
def test_report_of_another_shape_is_told(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "run.yaml").write_text("seed: 1")
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match="a file is damaged"):
        report(REPORT.parse([f"run={tmp_path}"]), Console(enabled=False))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run=absent", "run=absent: no such folder."),
        ("run=empty", "run=empty: no run found. Give the output_dir of a run."),
        ("sweep=empty", "sweep=empty: no sweep.json found."),
        ("run=made to=notes.txt", "to=notes.txt: the file exists and is not a report."),
        ("run=made to=empty", "to=empty: this is a folder. Give a file in it, e.g. to=empty/report.html."),
        ("run=made to=no/page.html", "to=no/page.html: no such folder: no."),
        ("sweep=made", "sweep=made: no sweep.json found. Give run=made."),
        ("runs=made,absent", "runs=absent: no such folder."),
    ],
)
def test_report_errors_are_reported(
    zygote: Zygote, finished: FinishedRuns, tmp_path: Path, words: str, said: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "made").symlink_to(finished())
    ended = zygote.run(tmp_path, *words.split(), module="app.report")
    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"error: {said}")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_report_bug_does_not_fail_the_run(tmp_path: Path) -> None:
    def broken() -> Page:
        raise ZeroDivisionError("of ours")

    told = write_page(tmp_path / "report.html", broken)
    assert told == "report  could not be written (ZeroDivisionError: of ours); all other files are complete"
    told = write_page(tmp_path / "absent" / "report.html", lambda: Page("page", []))
    assert told.startswith("report  could not be written (EnvironmentProblem: ")
    assert list(tmp_path.iterdir()) == []
