"""Sweeps as a user starts them: one fails, one is stopped, one is killed; what is done is not done again."""

import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app.config.load import compose_run
from tests.conftest import RunApp
from tests.runs import SMALL, Ended, Running, Zygote, has_reached, metrics, numbers, result

TINY = (*SMALL, "eval.samples=0", "training.max_steps=2")
LONG = (
    *SMALL,
    "eval.every=0",
    "eval.samples=0",
    "checkpoint.every=0",
    "training.max_steps=100",
    "training.epochs=20",
)
FORKED = "tests.command.forked_trials"


def start(zygote: Zygote, folder: Path, *given: str, **env: str) -> Running:
    return zygote.start(folder, "-m", *given, module=FORKED, **env)


def run(zygote: Zygote, folder: Path, *given: str, **env: str) -> Ended:
    return start(zygote, folder, *given, **env).wait()


def content(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "sweep.json").read_text())
    return values


def column(folder: Path, name: str) -> list[Any]:
    return [trial[name] for trial in content(folder)["trials"]]


def starts(trial: Path) -> int:
    return len(json.loads((trial / "manifest.json").read_text())["starts"])


def test_four_trials_of_which_one_fails(zygote: Zygote, tmp_path: Path) -> None:
    command = (*TINY, "adapter.targets=[q_proj],[nosuch],[q_proj,v_proj],[all-linear]", "cache_dir='a cache'")
    ended = run(zygote, tmp_path, *command)
    assert (ended.code, ended.stderr) == (3, "")
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("sweep-targets-")
    trials = [Path(tmp_path, place) for place in column(folder, "folder")]
    assert [trial.name for trial in trials] == [
        "1-adapter.targets=q_proj",
        "2-adapter.targets=nosuch",
        "3-adapter.targets=q_proj,v_proj",
        "4-adapter.targets=all-linear",
    ]
    assert column(folder, "status") == ["finished", "failed", "finished", "finished"]
    assert column(folder, "exit_code") == [0, 2, 0, 0]
    assert column(folder, "values")[2] == {"adapter.targets": ["q_proj", "v_proj"]}
    assert "nosuch matches no linear layer of this model" in column(folder, "error")[1]
    objectives = [result(trial)["objective"] for trial in trials if trial != trials[1]]
    assert [value for value in column(folder, "objective") if value is not None] == objectives
    assert len(set(objectives)) == 3
    best = content(folder)["best"]
    assert best["objective"] == min(objectives)
    lines = ended.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("trial ")] == [
        f"trial {number}/4" for number in (1, 2, 3, 4)
    ]
    assert f"      {best['line']}" in lines
    (row,) = (line for line in lines if line.startswith("   1 "))
    assert row.split()[1] == str(best["number"])
    assert "    error: adapter.targets: nosuch matches no linear layer" in ended.stdout

    pasted = zygote.run(tmp_path, *shlex.split(best["line"]), "output_dir=pasted")
    assert pasted.code == 0, pasted.stderr
    assert result(tmp_path / "pasted")["objective"] == best["objective"]

    before = [(trial / "result.json").read_bytes() for trial in trials if trial != trials[1]]
    again = run(zygote, tmp_path, *command)
    assert again.code == 3
    assert again.stdout.count("finished before, objective") == 3
    assert [(trial / "result.json").read_bytes() for trial in trials if trial != trials[1]] == before
    assert content(folder)["best"] == best

    other = run(zygote, tmp_path, *command, "seed=1,2", f"output_dir={folder}")
    assert other.code == 2
    assert "the folder has another sweep" in other.stderr


def test_ctrl_c_saves_and_the_same_command_goes_on(zygote: Zygote, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    command = (*LONG, "seed=1,2", f"output_dir={folder}")
    plan = run(zygote, tmp_path, *command, "dry_run=true")
    assert (plan.code, plan.stderr) == (0, "")
    assert column(folder, "status") == ["dry_run", "dry_run"]
    assert plan.stdout.count("\n  model  ") == 2
    assert content(folder)["best"] is None

    first, second = folder / "1-seed=1", folder / "2-seed=2"
    running = start(zygote, tmp_path, *command)
    running.until(lambda: has_reached(first, 3))
    ended = running.stop(signal.SIGINT)
    assert (ended.code, ended.stderr) == (130, "")
    assert "the same command goes on from here" in ended.stdout
    assert result(first)["status"] == "stopped"
    assert column(folder, "status") == ["stopped", "pending"]
    (save,) = (first / "checkpoints").iterdir()
    at = int(save.name.removeprefix("step-"))
    assert 3 <= at < 100

    running = start(zygote, tmp_path, *command)
    running.until(lambda: has_reached(second, 3))
    ended = running.stop(signal.SIGUSR1)
    assert (ended.code, ended.stderr) == (75, "")
    assert column(folder, "status") == ["finished", "stopped"]

    ended = run(zygote, tmp_path, *command)
    assert (ended.code, ended.stderr) == (0, "")
    assert [starts(first), starts(second)] == [3, 3]  # the plan, the stop, the end
    for trial in (first, second):
        assert [line["step"] for line in numbers(trial) if "loss" in line] == list(range(1, 101))
    assert all(seconds > 0 for seconds in column(folder, "seconds"))


def test_a_search_goes_on_after_a_kill_with_what_it_had_proposed(zygote: Zygote, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    space = "sweep.space.optimizer.lr={low: 0.1x, high: 10x, log: true}"
    command = (*TINY, "sweep=optuna", space, "adapter.r=8", "sweep.trials=3", f"output_dir={folder}")

    def is_in_its_second_trial() -> bool:
        return (folder / "sweep.json").exists() and column(folder, "status")[1:] == ["running"]

    running = start(zygote, tmp_path, *command)
    running.until(is_in_its_second_trial)
    assert running.kill().code == -signal.SIGKILL
    begun = content(folder)["trials"]
    assert begun[0]["status"] == "finished"

    ended = run(zygote, tmp_path, *command)
    assert (ended.code, ended.stderr) == (0, "")
    trials = content(folder)["trials"]
    kept = ("folder", "overrides", "values", "proposed")
    assert [[trial[name] for name in kept] for trial in trials[:2]] == [
        [trial[name] for name in kept] for trial in begun
    ]
    assert trials[0] == begun[0]
    assert starts(Path(trials[0]["folder"])) == 1
    assert [trial["status"] for trial in trials] == ["finished"] * 3
    assert len({trial["values"]["optimizer.lr"] for trial in trials}) == 3
    assert trials[0]["values"] == {
        "optimizer.lr": compose_run(["recipe=lora"]).optimizer.lr,
        "adapter.dropout": 0.0,
        "schedule.warmup_fraction": 0.03,
    }
    best = content(folder)["best"]
    assert best["objective"] == min(column(folder, "objective"))
    pasted = zygote.run(tmp_path, *shlex.split(best["line"]), "output_dir=pasted", "dry_run=true")
    assert pasted.code == 0, pasted.stderr

    more = run(zygote, tmp_path, *(word.replace("trials=3", "trials=4") for word in command))
    assert (more.code, more.stdout.count("finished before, objective")) == (0, 3)
    assert content(folder)["trials"][:3] == trials
    assert column(folder, "status") == ["finished"] * 4


def processes_in(session: int) -> bool:
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_sweep_that_is_killed_takes_its_trial_along(
    zygote: Zygote, tmp_path: Path, app_env: dict[str, str]
) -> None:
    """With the real command for the trial; it has no swept values, which is a sweep of one."""
    folder, trial = tmp_path / "sweep", tmp_path / "sweep" / "1"
    command = (*LONG, "training.max_steps=null", "training.epochs=1000", f"output_dir={folder}")
    environment = app_env | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    sweep = subprocess.Popen(
        [sys.executable, "-m", "app.train", "-m", *command], cwd=tmp_path, env=environment
    )
    deadline = time.monotonic() + 120
    while not has_reached(trial, 3):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process = int((trial / ".lock").read_text().split()[1])
    assert process != sweep.pid
    assert os.getsid(process) == process
    sweep.kill()
    sweep.wait()
    try:
        while processes_in(process):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    except AssertionError:
        os.killpg(process, signal.SIGKILL)
        raise
    assert result(trial)["status"] == "stopped"
    assert column(folder, "status") == ["running"]
    (save,) = (trial / "checkpoints").iterdir()
    at = int(save.name.removeprefix("step-"))
    assert at == metrics(trial)[-1]["step"]
    assert (folder / "1.txt").read_text().count(f"stopped after step {at}, which is saved.") == 1


def test_it_waits_for_a_trial_that_is_still_at_work(zygote: Zygote, tmp_path: Path) -> None:
    """As after kill -9, when the trial takes long to save."""
    trial = tmp_path / "sweep" / "1"
    command = LONG
    alone = zygote.start(tmp_path, *command, f"output_dir={trial}")
    alone.until(partial(has_reached, trial, 1))
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    ended = run(zygote, tmp_path, *command, "output_dir=sweep")
    assert alone.wait().code == 0
    assert (ended.code, ended.stderr) == (0, "")
    assert f"  waiting: process {alone.pid} on " in ended.stdout
    assert column(tmp_path / "sweep", "status") == ["finished"]
    assert "finished before" in ended.stdout


def seconds_of_children() -> float:
    """Of the processor: what the clock says is also what else the machine does."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize(
    "varied",
    [
        ["seed=0,1,2,3,4", "optimizer.lr=1e-3,fast"],
        ["sweep=lr"],
        ["sweep=optuna", "sweep.space.adapter.alpha={low: 1, high: 2}"],
    ],
    ids=lambda words: words[0],
)
def test_typos_are_told_before_the_first_trial(run_app: RunApp, tmp_path: Path, varied: list[str]) -> None:
    waited = []
    for _ in range(3):
        begin = seconds_of_children()
        ended = run_app("-m", *varied, "training.clop=1", "recipe=lora")
        waited.append(seconds_of_children() - begin)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: training.clop is not a key. Did you mean training.clip?")
    assert list(tmp_path.iterdir()) == []
    assert min(waited) < 1.0


def test_the_function_that_hydra_calls_returns_the_objective(zygote: Zygote, tmp_path: Path) -> None:
    ended = zygote.run(tmp_path, *TINY, "output_dir=run", module="tests.command.objective")
    assert ended.code == 0, ended.stderr
    assert f"returned {result(tmp_path / 'run')['objective']!r}\n" in ended.stdout


def test_trials_are_a_group_in_wandb(zygote: Zygote, tmp_path: Path) -> None:
    given = (*TINY, "training.max_steps=1", "tracker=wandb", "output_dir=sweep")
    ended = run(zygote, tmp_path, *given, WANDB_MODE="offline", WANDB_RUN_GROUP="group-of-mine")
    assert (ended.code, ended.stderr) == (0, "")
    (file,) = {file.resolve() for file in tmp_path.rglob("*.wandb")}
    assert b"group-of-mine" in file.read_bytes()
