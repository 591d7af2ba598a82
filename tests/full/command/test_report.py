"""Pages that runs and sweeps write, and reproduced runs."""

import json
import os
import re
import shutil
import signal
from functools import partial
from pathlib import Path

from app.pages.run_page import run_page
from tests.command.test_report import RANDOM
from tests.command.test_reproduce import SHORT, again, change_a_loss, check_same_bits, folder
from tests.harness.runs import SMALL, Zygote, has_reached, metrics, result
from tests.pages.values import lines


def test_stopped_and_failed_runs_have_reports(zygote: Zygote, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = (*SMALL, "model.weights=random", "output_dir=run", "resume=auto")
    running = zygote.start(tmp_path, *command, "training.epochs=40")
    running.until(partial(has_reached, run, 3))
    zygote.run(tmp_path, f"run={run}", module="app.report", code=0)
    assert '<span class="badge busy">still running</span>' in (run / "report.html").read_text()
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait().code == 75
    assert '<span class="badge warn">stopped</span>' in (run / "report.html").read_text()
    assert len(lines(run_page(run), "Loss")["train"]) == result(run)["steps"]

    ruin = ("optimizer.lr=1e30", "training.clip=0", "training.max_bad_steps=2")
    zygote.run(tmp_path, *SMALL, "model.weights=random", *ruin, "recipe=full", "output_dir=failed", code=2)
    page = (tmp_path / "failed" / "report.html").read_text()
    assert '<span class="badge bad">failed</span>' in page
    assert "NaN/Inf" in page.partition('<div class="note bad">')[2].partition("</div>")[0]


def test_sweep_has_a_report(zygote: Zygote, tmp_path: Path) -> None:
    words = (*RANDOM, "training.max_steps=1", "eval.samples=0", "optimizer.lr=1e-3,1e-2", "output_dir=sweep")
    ended = zygote.finish(tmp_path, "-m", *words, module="tests.command.forked_trials")
    assert ended.stdout.splitlines()[-1] == "report  sweep/report.html"
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert sorted(re.findall('href="(.*?)"', page)) == [
        f"./{n}-optimizer.lr%3D{rate}/report.html" for n, rate in ((1, 0.001), (2, 0.01))
    ]
    best = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["best"]
    assert f'<pre class="command">finetune train {best["line"]}</pre>' in page

    trials = ",".join(str(each) for each in sorted((tmp_path / "sweep").glob("*-optimizer.lr=0.0?*/")))
    compared = zygote.run(tmp_path, f"runs={trials}", module="app.report")
    assert (compared.code, compared.stdout) == (0, "report  comparison.html\n")
    page = (tmp_path / "comparison.html").read_text().partition("Settings that differ")[2].partition("</section>")[0]
    assert re.findall('<t[dh](?: scope="row")?>([^<]+)<', page)[-3:] == ["optimizer.lr", "0.001", "0.01"]


__all__ = ["folder"]  # a fixture


def test_reproduce_a_resumed_run_in_one_start(zygote: Zygote, tmp_path: Path) -> None:
    command = (*SHORT, "record.every=2", "eval.every=0", "output_dir=run", "resume=auto")
    assert zygote.run(tmp_path, *command, "training.stop_after=3").code == 75
    unfinished, found = again(zygote, tmp_path)
    assert unfinished.code == 0, unfinished.stderr
    assert (found["lines"], found["last_step"]) == (3, 3)
    shutil.rmtree(tmp_path / "run-reproduced")

    assert zygote.run(tmp_path, *command, "training.stop_after=3").code == 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 6, 6]
    ended, found = again(zygote, tmp_path)
    assert ended.code == 0, ended.stderr
    assert [line["step"] for line in metrics(tmp_path / "run-reproduced")] == [1, 2, 4, 6, 6]
    assert (found["same_bits"], found["lines"], found["last_step"]) == (True, 5, 6)


def test_reproduce_refuses_other_rows(zygote: Zygote, folder: Path) -> None:
    rows = (folder / "rows.jsonl").read_text().splitlines(keepends=True)
    (folder / "rows.jsonl").write_text("".join(rows[1:]))
    ended, _ = again(zygote, folder)
    assert ended.code == 2
    assert "error: run=run: training data: " in ended.stderr
    assert "anyway=true" in ended.stderr
    assert not (folder / "run-reproduced").exists()
    (folder / "moved.jsonl").write_text("".join(rows))
    moved, found = again(zygote, folder, "dataset.path=moved.jsonl", "steps=1")
    assert (moved.code, found["same_bits"]) == (0, True), moved.stderr
    shutil.rmtree(folder / "run-reproduced")
    anyway, found = again(zygote, folder, "anyway=true", "steps=1")
    assert (anyway.code, anyway.stderr) == (3, "")
    assert [each["name"] for each in found["origin"]] == ["training data"]


def test_reproduce_within_the_tolerance_agrees(zygote: Zygote, folder: Path) -> None:
    change_a_loss(folder / "run")
    near, found = again(zygote, folder, "steps=2", "tolerance=0.01")
    assert near.code == 0, near.stderr
    assert "\nStopped. Saved checkpoint at step 2.\n" in near.stdout
    assert "To resume" not in near.stdout, "nothing to resume"
    assert "\nresult  agrees" in near.stdout
    assert (found["agrees"], found["same_bits"]) == (True, False)


def test_reproduce_gives_the_same_bits(zygote: Zygote, tmp_path: Path) -> None:
    zygote.run(
        tmp_path, *SHORT, "recipe=qlora", "adapter.dropout=0.1", "output_dir=run", "training.max_steps=4", code=0
    )
    check_same_bits(zygote, tmp_path)
