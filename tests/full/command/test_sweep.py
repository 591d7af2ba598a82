"""Sweeps as a user starts them: one fails, one is stopped, one is killed; what is done is not done again."""

import os
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from app.config.load import compose_run
from app.sweeps.sweep import read_ladder
from tests.command.test_sweep import LONG, TINY, run, start, starts
from tests.harness.runs import Zygote, has_reached, metrics, numbers, result, wait_until
from tests.sweeps.test_runner import column, content


def test_sweep_ctrl_c_saves_and_resumes(zygote: Zygote, tmp_path: Path) -> None:
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
    assert "Stopped. Run the same command to continue." in ended.stdout
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


def test_killed_search_resumes_its_proposals(zygote: Zygote, tmp_path: Path) -> None:
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
    zygote.run(tmp_path, *shlex.split(best["line"]), "output_dir=pasted", "dry_run=true", code=0)

    more = run(zygote, tmp_path, *(word.replace("trials=3", "trials=4") for word in command))
    assert (more.code, more.stdout.count("already finished, objective")) == (0, 3)
    assert content(folder)["trials"][:3] == trials
    assert column(folder, "status") == ["finished"] * 4


def processes_in(session: int) -> bool:
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True


def test_killed_sweep_ends_its_trial(zygote: Zygote, tmp_path: Path, app_env: dict[str, str]) -> None:
    """With the real command for the trial; it has no swept values, which is a sweep of one."""
    folder, trial = tmp_path / "sweep", tmp_path / "sweep" / "1"
    command = (*LONG, "training.max_steps=null", "training.epochs=1000", f"output_dir={folder}")
    environment = app_env | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    sweep = subprocess.Popen([sys.executable, "-m", "app.train", "-m", *command], cwd=tmp_path, env=environment)
    wait_until(partial(has_reached, trial, 3), 120)
    process = int((trial / ".lock").read_text().split()[1])
    assert process != sweep.pid
    assert os.getsid(process) == process
    sweep.kill()
    sweep.wait()
    try:
        wait_until(lambda: not processes_in(process), 120)
    except AssertionError:
        os.killpg(process, signal.SIGKILL)
        raise
    assert result(trial)["status"] == "stopped"
    assert column(folder, "status") == ["running"]
    (save,) = (trial / "checkpoints").iterdir()
    at = int(save.name.removeprefix("step-"))
    assert at == metrics(trial)[-1]["step"]
    assert (folder / "1.txt").read_text().count(f"Stopped. Saved checkpoint at step {at}.") == 1


def test_sweep_waits_for_a_running_trial(zygote: Zygote, tmp_path: Path) -> None:
    """As after kill -9, when the trial takes long to save."""
    trial = tmp_path / "sweep" / "1"
    command = LONG
    run(zygote, tmp_path, *command, "output_dir=sweep", "dry_run=true")
    alone = zygote.start(tmp_path, *command, f"output_dir={trial}", "resume=auto")
    alone.until(partial(has_reached, trial, 1))
    ended = run(zygote, tmp_path, *command, "output_dir=sweep")
    assert alone.wait().code == 0
    assert (ended.code, ended.stderr) == (0, "")
    assert f"  waiting: process {alone.pid} on " in ended.stdout
    assert column(tmp_path / "sweep", "status") == ["finished"]
    assert "already finished" in ended.stdout


def test_ladder_of_two_rungs(zygote: Zygote, tmp_path: Path) -> None:
    folder = tmp_path / "ladder"
    command = ("sweep=packing", "sweep.size=small", "training.max_steps=4", "dataset.random.rows=200")
    ended = run(zygote, tmp_path, *command, f"output_dir={folder}")
    assert (ended.code, ended.stderr) == (0, "")
    assert column(folder, "status") == ["finished"] * 4
    assert [Path(place).name for place in column(folder, "folder")] == [
        "1-padded",
        "2-packed",
        "1-padded-2",
        "2-packed-2",
    ]
    padded, packed = content(folder)["ladder"]["rungs"]
    assert (padded["batch"], packed["batch"]) == ("32 x 1", "2080 tokens x 1")
    assert (padded["repeats"], packed["repeats"]) == (2, 2)
    assert padded["padding"] > 0.6 > packed["padding"]
    assert padded["tokens_per_second"] < packed["tokens_per_second"]
    assert (padded["as_first"], packed["as_first"]) == (None, None), "bins are compared with rows"
    assert packed["memory_measured_bytes"] == result(folder / "2-packed")["memory_measured_bytes"]
    assert packed["forward_seconds"] < packed["backward_seconds"]
    table = (folder / "ladder.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| packed")]
    assert [" ".join(row) for row in rows] == [
        " ".join(line.split()) for line in ended.stdout.splitlines() if line.startswith("packed ")
    ]
    page = (folder / "report.html").read_text()
    assert all(f"<td>{cell}</td>" in page for row in rows for cell in row)


def test_optimizers_ladder_small(zygote: Zygote, tmp_path: Path) -> None:
    """One arithmetic in three ways; states of 8 bits; a package that is missing refuses its rung alone."""
    ended = run(zygote, tmp_path, "sweep=optimizers", "sweep.size=small", "sweep.repeats=1", "output_dir=ladder")
    assert (ended.code, ended.stderr) == (0, "")
    rungs = {rung["name"]: rung for rung in content(tmp_path / "ladder")["ladder"]["rungs"]}
    assert {name for name, rung in rungs.items() if rung["status"] != "finished"} <= {"adamw_apex", "galore"}
    fused, foreach, loop = (rungs[name]["train_loss_last"] for name in ("adamw", "adamw_foreach", "adamw_loop"))
    assert foreach == loop == pytest.approx(fused, rel=1e-4), "fused kernels round otherwise"
    assert rungs["adamw_8bit"]["memory_measured_bytes"] < rungs["adamw"]["memory_measured_bytes"]


RUNGS = [
    ("mlm", "compile", "4 layers compiled as 1 graph"),
    ("quantized", "fp8", ""),
    ("quantized", "nf4_without_double", ""),
    ("quantized", "paged", "paging has no effect on CPU"),
]


@pytest.mark.parametrize(("ladder", "rung", "said"), RUNGS, ids=lambda word: word or "-")
def test_rung_with_a_key_of_its_own(zygote: Zygote, tmp_path: Path, ladder: str, rung: str, said: str) -> None:
    words = [f"sweep={ladder}", "sweep.size=small", "training.max_steps=3", "dataset.eval_max_rows=8"]
    backend = ["compile.backend=aot_eager"] if rung == "compile" else []
    (trial,) = (each for each in read_ladder([*words, *backend]).points if each.name.partition("-")[2] == rung)
    ended = zygote.run(tmp_path, *trial.overrides, "output_dir=run", code=0)
    assert result(tmp_path / "run")["steps"] == 3
    assert said in ended.stdout


def test_single_gpu_ladder_small(zygote: Zygote, tmp_path: Path) -> None:
    """Rungs with the same arithmetic learn the same; what a CPU lacks is refused by name."""
    ended = run(zygote, tmp_path, "sweep=single_gpu", "sweep.size=small", "sweep.repeats=1", "output_dir=ladder")
    assert (ended.code, ended.stderr) == (0, "")
    rungs = {rung["name"]: rung for rung in content(tmp_path / "ladder")["ladder"]["rungs"]}
    refused = {name for name, rung in rungs.items() if rung["status"] == "refused"}
    assert refused <= {"tf32"}, "a GPU has it"
    finished = {name: rung for name, rung in rungs.items() if name not in refused}
    assert {rung["status"] for rung in finished.values()} == {"finished"}
    assert {rung["as_first"] for name, rung in finished.items() if name != "baseline"} <= {"equal", "close"}
    assert all(rung["ratio"] or rung["no_ratio"] for rung in finished.values())
    assert finished["checkpointing"]["train_loss_last"] == finished["accumulation"]["train_loss_last"]
    memory = {name: rung["memory_measured_bytes"] for name, rung in finished.items()}
    assert memory["checkpointing"] < memory["accumulation"] < memory["baseline"] / 1.5
    assert memory["all_and_8bit_adam"] < memory["all_three"]
