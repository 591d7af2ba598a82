"""Pages as the program writes them: at the end of runs and sweeps, and when they are asked for."""

import json
import os
import signal
from functools import partial
from pathlib import Path

from tests.command.test_report import RANDOM, page_of
from tests.harness.runs import SMALL, Zygote, has_reached, result
from tests.pages.reading import chart, drawn, section


def test_stopped_and_failed_runs_have_reports(zygote: Zygote, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = (*SMALL, "model.weights=random", "output_dir=run", "resume=auto")
    running = zygote.start(tmp_path, *command, "training.epochs=40")
    running.until(partial(has_reached, run, 3))
    zygote.run(tmp_path, f"run={run}", module="app.report", code=0)
    assert page_of(run / "report.html").one("div", "top").one("span").text == "still running"
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait().code == 75
    page = page_of(run / "report.html")
    assert page.one("div", "top").one("span").text == "stopped"
    assert len(drawn(chart(page, "Loss"))[0]) == result(run)["steps"]

    ruin = ("optimizer.lr=1e30", "training.clip=0", "training.max_bad_steps=2")
    zygote.run(tmp_path, *SMALL, "model.weights=random", *ruin, "recipe=full", "output_dir=failed", code=2)
    page = page_of(tmp_path / "failed" / "report.html")
    assert page.one("div", "top").one("span").text == "failed"
    assert "not finite" in page.one("div", "note").text


def test_sweep_has_a_report(zygote: Zygote, tmp_path: Path) -> None:
    words = (*RANDOM, "training.max_steps=1", "eval.samples=0", "optimizer.lr=1e-3,1e-2", "output_dir=sweep")
    ended = zygote.finish(tmp_path, "-m", *words, module="tests.command.forked_trials")
    assert ended.stdout.splitlines()[-1] == "report  sweep/report.html"
    page = page_of(tmp_path / "sweep" / "report.html")
    links = [str(link.attributes["href"]) for link in page.all("a")]
    assert sorted(links) == [f"./{n}-optimizer.lr%3D{rate}/report.html" for n, rate in ((1, 0.001), (2, 0.01))]
    best = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["best"]
    assert section(page, "Best").one("pre").text == f"python -m app.train {best['line']}"

    trials = ",".join(str(each) for each in sorted((tmp_path / "sweep").glob("*-optimizer.lr=0.0?*/")))
    compared = zygote.run(tmp_path, f"runs={trials}", module="app.report")
    assert (compared.code, compared.stdout) == (0, "report  comparison.html\n")
    differing = section(page_of(tmp_path / "comparison.html"), "Settings that differ")
    assert [cell.text for cell in differing.all("td")] == ["optimizer.lr", "0.001", "0.01"]
