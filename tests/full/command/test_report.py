"""Pages as the program writes them: at the end of runs and sweeps, and when they are asked for."""

import json
import os
import re
import signal
from functools import partial
from pathlib import Path

from app.pages.run_page import run_page
from tests.command.test_report import RANDOM
from tests.harness.runs import SMALL, Zygote, has_reached, result
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
    assert "not finite" in page.partition('<div class="note bad">')[2].partition("</div>")[0]


def test_sweep_has_a_report(zygote: Zygote, tmp_path: Path) -> None:
    words = (*RANDOM, "training.max_steps=1", "eval.samples=0", "optimizer.lr=1e-3,1e-2", "output_dir=sweep")
    ended = zygote.finish(tmp_path, "-m", *words, module="tests.command.forked_trials")
    assert ended.stdout.splitlines()[-1] == "report  sweep/report.html"
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert sorted(re.findall('href="(.*?)"', page)) == [
        f"./{n}-optimizer.lr%3D{rate}/report.html" for n, rate in ((1, 0.001), (2, 0.01))
    ]
    best = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["best"]
    assert f'<pre class="command">python -m app.train {best["line"]}</pre>' in page

    trials = ",".join(str(each) for each in sorted((tmp_path / "sweep").glob("*-optimizer.lr=0.0?*/")))
    compared = zygote.run(tmp_path, f"runs={trials}", module="app.report")
    assert (compared.code, compared.stdout) == (0, "report  comparison.html\n")
    page = (tmp_path / "comparison.html").read_text().partition("Settings that differ")[2].partition("</section>")[0]
    assert re.findall('<t[dh](?: scope="row")?>([^<]+)<', page)[-3:] == ["optimizer.lr", "0.001", "0.01"]
