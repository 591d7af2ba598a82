"""Pages as the program writes them: at the end of runs and sweeps, and when they are asked for."""

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from app.page import writing
from app.page.run_page import run_page
from tests.command.test_resume import SMALL, has_reached
from tests.conftest import RunApp
from tests.page.reading import Element, chart, drawn, read, section
from tests.runs import Zygote, metrics, result

RANDOM = (*SMALL, "model.weights=random", "training.max_steps=4")


@pytest.fixture(scope="module")
def made(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """A run, trained once."""
    folder = tmp_path_factory.mktemp("runs")

    def make() -> Path:
        if not (folder / "run").exists():
            ended = zygote.run(folder, *RANDOM, "output_dir=run")
            assert (ended.code, ended.stderr) == (0, "")
            assert ended.stdout.splitlines()[-1] == f"report  {folder / 'run' / 'report.html'}"
        return folder / "run"

    return make


def page_of(file: Path) -> Element:
    return read(file.read_text())


def test_a_run_ends_in_a_page_of_its_numbers(made: Callable[[], Path]) -> None:
    run = made()
    page = page_of(run / "report.html")
    assert page.one("div", "top").one("span").text == "finished"
    lines = metrics(run)
    figure = chart(page, "Loss")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert [y for _, y in drawn(figure, "c0")[0]] == pytest.approx(losses, rel=1e-4)
    evals = [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line]
    assert drawn(figure, "c1")[0][-1] == pytest.approx(evals[-1], rel=1e-3)
    checks = section(page, "Self-checks")
    proofs = json.loads((run / "manifest.json").read_text())["proofs"]
    fused = [proof for proof in proofs if proof["what"].startswith("fused ")]
    assert len(proofs) == 4 + len(fused) > 4, "head, its faster way, packing twice"
    assert [each.text for each in checks.all("span", "badge")] == ["holds"] * len(proofs)
    assert all(0 <= proof["difference"] <= proof["allowed"] for proof in proofs)
    counts = json.loads((run / "manifest.json").read_text())["counts"]
    more = counts["units"] - counts["least_units"]
    beyond = f"{more} more than provably needed" if more else "provably the fewest"
    assert f"{counts['fill']:.1%} full, {beyond}." in section(page, "Data").text
    trained = [mark.text for mark in section(page, "Data").all("mark")[1:]]
    assert len(trained) >= 4
    assert all(text.endswith("<|end|>") for text in trained)
    assert "report" in (run / "log.txt").read_text().splitlines()[-1]


def test_it_is_made_anew_without_torch(made: Callable[[], Path], run_app: RunApp, tmp_path: Path) -> None:
    run = made()
    ended = run_app(f"run={run}", "to=page.html", module="app.report", env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert (ended.returncode, ended.stdout) == (0, "report  page.html\n")
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "app.page.run_page" in imported
    assert not {"torch", "numpy", "transformers", "hydra"} & imported
    assert (
        section(page_of(tmp_path / "page.html"), "Data").text
        == section(page_of(run / "report.html"), "Data").text
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run=absent", "run=absent: there is no such folder."),
        ("run=empty", "run=empty: there is no run in it. Give the output_dir of a run."),
        ("sweep=empty", "sweep=empty: there is no sweep.json in it."),
        ("run=made to=notes.txt", "to=notes.txt: there is something else already."),
        ("run=made to=empty", "to=empty: this is a folder. Give a file in it, such as to=empty/report.html."),
        ("run=made to=no/page.html", "to=no/page.html: there is no folder no."),
        ("sweep=made", "sweep=made: there is no sweep.json in it. Give run=made."),
        ("runs=made,absent", "runs=absent: there is no such folder."),
    ],
)
def test_what_cannot_be_done_is_said(
    zygote: Zygote, made: Callable[[], Path], tmp_path: Path, words: str, said: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "made").symlink_to(made())
    ended = zygote.run(tmp_path, *words.split(), module="app.report")
    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"error: {said}")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_run_that_is_stopped_goes_on_or_fails_has_its_page(zygote: Zygote, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = (*SMALL, "model.weights=random", "output_dir=run", "resume=auto")
    running = zygote.start(tmp_path, *command, "training.epochs=40")
    running.until(partial(has_reached, run, 3))
    there = zygote.run(tmp_path, f"run={run}", module="app.report")
    assert there.code == 0
    assert page_of(run / "report.html").one("div", "top").one("span").text == "still running"
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait().code == 75
    page = page_of(run / "report.html")
    assert page.one("div", "top").one("span").text == "stopped"
    assert len(drawn(chart(page, "Loss"))[0]) == result(run)["steps"]

    ruin = ("optimizer.lr=1e30", "training.clip=0", "training.max_bad_steps=2")
    failed = zygote.run(tmp_path, *SMALL, "model.weights=random", *ruin, "recipe=full", "output_dir=failed")
    assert failed.code == 2, failed.stderr
    page = page_of(tmp_path / "failed" / "report.html")
    assert page.one("div", "top").one("span").text == "failed"
    assert "not finite" in page.one("div", "note").text


def test_a_dry_run_shows_what_would_be_trained(zygote: Zygote, tmp_path: Path) -> None:
    ended = zygote.run(tmp_path, *SMALL, "dry_run=true", "output_dir=run")
    assert (ended.code, ended.stderr) == (0, "")
    page = page_of(tmp_path / "run" / "report.html")
    assert page.one("div", "top").one("span").text == "dry run"
    assert len(section(page, "Data").all("div", "row")) == 4


def test_a_sweep_ends_in_a_page(zygote: Zygote, tmp_path: Path) -> None:
    words = (*RANDOM, "training.max_steps=1", "eval.samples=0", "optimizer.lr=1e-3,1e-2", "output_dir=sweep")
    ended = zygote.run(tmp_path, "-m", *words, module="tests.command.forked_trials")
    assert (ended.code, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[-1] == "report  sweep/report.html"
    page = page_of(tmp_path / "sweep" / "report.html")
    links = [str(link.attributes["href"]) for link in page.all("a")]
    assert sorted(links) == [f"./{n}-optimizer.lr%3D1e-{e}/report.html" for n, e in ((1, 3), (2, 2))]
    best = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["best"]
    assert section(page, "Best").one("pre").text == f"python -m app.train {best['line']}"

    trials = ",".join(str(each) for each in sorted((tmp_path / "sweep").glob("*-optimizer.lr=1e-?")))
    compared = zygote.run(tmp_path, f"runs={trials}", module="app.report")
    assert (compared.code, compared.stdout) == (0, "report  comparison.html\n")
    differing = section(page_of(tmp_path / "comparison.html"), "Settings that differ")
    assert [cell.text for cell in differing.all("td")] == ["optimizer.lr", "0.001", "0.01"]


def test_a_fault_in_a_page_is_told_and_harms_nothing(tmp_path: Path) -> None:
    def broken() -> str:
        raise ZeroDivisionError("of ours")

    told = writing.written_page(tmp_path / "report.html", broken)
    assert told == "report  could not be made (ZeroDivisionError: of ours); nothing else is missing"
    told = writing.written_page(tmp_path / "absent" / "report.html", lambda: "page")
    assert told.startswith("report  could not be made (EnvironmentProblem: ")
    assert list(tmp_path.iterdir()) == []


def test_it_costs_little(made: Callable[[], Path]) -> None:
    """Of the processor, the best of three, at the end of each run."""
    import time

    run, seconds = made(), []
    for _ in range(3):
        begin = time.process_time()
        run_page(run)
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.2
