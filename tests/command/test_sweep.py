"""Sweeps as a user starts them: one fails, one is stopped, one is killed; what is done is not done again."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

from app.config.load import compose_run, read_run
from tests.harness.runs import SMALL, Ended, Running, Zygote, result
from tests.sweeps.test_runner import column, content

TINY = (*SMALL, "eval.samples=0", "training.max_steps=2")
LONG = (*SMALL, "eval.every=0", "eval.samples=0", "checkpoint.every=0", "training.max_steps=100", "training.epochs=20")
FORKED = "tests.command.forked_trials"


def start(zygote: Zygote, folder: Path, *given: str, **env: str) -> Running:
    return zygote.start(folder, "-m", *given, module=FORKED, **env)


def run(zygote: Zygote, folder: Path, *given: str, **env: str) -> Ended:
    return start(zygote, folder, *given, **env).wait()


def starts(trial: Path) -> int:
    return len(json.loads((trial / "manifest.json").read_text())["starts"])


def test_sweep_with_a_failing_trial_finishes_the_others(zygote: Zygote, tmp_path: Path) -> None:
    command = (*TINY, "adapter.targets=[q_proj],[nosuch],[q_proj,v_proj]", "cache_dir='a cache'")
    ended = run(zygote, tmp_path, *command)
    assert (ended.code, ended.stderr) == (3, "")
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("sweep-targets-")
    trials = [Path(tmp_path, place) for place in column(folder, "folder")]
    assert [trial.name for trial in trials] == [
        "1-adapter.targets=q_proj",
        "2-adapter.targets=nosuch",
        "3-adapter.targets=q_proj,v_proj",
    ]
    assert column(folder, "status") == ["finished", "failed", "finished"]
    assert column(folder, "exit_code") == [0, 2, 0]
    assert column(folder, "values")[2] == {"adapter.targets": ["q_proj", "v_proj"]}
    assert "nosuch matches no linear layer of this model" in column(folder, "error")[1]
    objectives = [result(trial)["objective"] for trial in trials if trial != trials[1]]
    assert [value for value in column(folder, "objective") if value is not None] == objectives
    assert len(set(objectives)) == 2
    best = content(folder)["best"]
    assert best["objective"] == min(objectives)
    best_trial = trials[best["number"] - 1]
    lines = ended.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("trial ")] == [
        f"trial {number}/3" for number in (1, 2, 3)
    ]
    assert f"      {best['line']}" in lines
    (row,) = (line for line in lines if line.startswith("1  "))
    assert row.split()[1] == str(best["number"])
    assert "    error: adapter.targets: nosuch matches no linear layer" in ended.stdout

    pasted, trained = compose_run(shlex.split(best["line"])), read_run(best_trial / "run.yaml")
    settled = {name: getattr(trained, name) for name in ("output_dir", "resume", "batching", "compile")}
    settled["training"] = replace(pasted.training, tile=trained.training.tile)
    assert replace(pasted, **settled) == trained

    before = [(trial / "result.json").read_bytes() for trial in trials if trial != trials[1]]
    again = run(zygote, tmp_path, *command)
    assert again.code == 3
    assert again.stdout.count("already finished, objective") == 2
    assert [(trial / "result.json").read_bytes() for trial in trials if trial != trials[1]] == before
    assert content(folder)["best"] == best
