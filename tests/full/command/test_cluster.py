"""A run on several machines goes on when one of them dies, when it fails, and when its time is over."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.full.command.machines import SCRIPTS, Job, Machine, free_job, free_port, processes_of
from tests.harness.runs import SMALL, Zygote, has_reached, result, same_ending

TRAINING = (*SMALL, "batching.accumulation=1", "training.epochs=2")


@pytest.fixture
def environment(app_env: dict[str, str], tmp_path: Path, quick_python: Path) -> dict[str, str]:
    return app_env | {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "TMPDIR": str(tmp_path),
        "APP_PYTHON": str(quick_python),
        "NODES": "2",
        "RENDEZVOUS": f"127.0.0.1:{free_port()}",
        "RUN_ID": "test",
        "ADDRESS": "127.0.0.1",
        "PROCESSES": "1",
        "MORE_RENDEZVOUS": "keep_alive_interval=1,join_timeout=60",
    }


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    """`node.sh` as one of two machines; `more` is added to its environment."""
    started: list[Machine] = []

    def begin(node: int, *arguments: str, **more: str) -> Machine:
        env = environment | {"NODE": str(node)} | more
        started.append(Machine(SCRIPTS / "node.sh", arguments, tmp_path, env))
        return started[-1]

    yield begin
    for machine in started:
        machine.die()


@pytest.fixture
def submit(environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """`slurm.sh` in a job of two machines; `more` is added to its environment."""
    submitted: list[Job] = []

    def begin(*arguments: str, **more: str) -> Job:
        submitted.append(Job(tmp_path, environment, *arguments, **more))
        return submitted[-1]

    yield begin
    for job in submitted:
        job.die()


@pytest.fixture(scope="module")
def whole(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    zygote.run_together(folder, 2, *TRAINING, "output_dir=run", code=0)
    return folder / "run"


def test_machine_dies_and_returns_run_is_unchanged(whole: Path, start: Callable[..., Machine], tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, second = (start(node, *TRAINING, f"output_dir={run}") for node in (0, 1))
    first.until(partial(has_reached, run, 5))
    second.die()
    again = start(1, *TRAINING, f"output_dir={run}")
    again.until((run / "checkpoints/step-000009").exists)
    again.kill_torchrun()
    assert (first.ended(), again.ended()) == (0, 0), first.printed + again.printed

    same_ending(whole, run)
    assert len(json.loads((run / "manifest.json").read_text())["starts"]) == 3
    assert again.printed.count("torchrun was killed by signal 9: it is started again") == 1
    assert processes_of(first.process.pid) == processes_of(again.process.pid) == []


def test_slurm_job_out_of_time_saves_and_is_requeued(whole: Path, submit: Callable[..., Job], tmp_path: Path) -> None:
    run = tmp_path / "run"
    requeued = tmp_path / "requeued"
    more = {"SLURM_JOB_ID": free_job()}
    again = partial(submit, *TRAINING, f"output_dir={run}", **more)

    first = again(REACHES="tasks")
    first.until(partial(has_reached, run, 3))
    first.process.send_signal(signal.SIGUSR1)
    assert first.ended() == 75, first.printed
    assert requeued.read_text().split() == [more["SLURM_JOB_ID"]]
    assert result(run)["status"] == "stopped"
    at = result(run)["steps"]

    second = again(REACHES="every process", SLURM_RESTART_COUNT="1")
    second.until(partial(has_reached, run, at + 3))
    second.process.send_signal(signal.SIGUSR1)
    assert second.ended() == 75, second.printed
    assert requeued.read_text().split() == [more["SLURM_JOB_ID"]] * 2
    assert result(run)["steps"] >= at + 3

    third = again(SLURM_RESTART_COUNT="2")
    assert third.ended() == 0, third.printed
    same_ending(whole, run)
    assert len(requeued.read_text().split()) == 2


def test_signal_to_one_machine_all_save_and_end(submit: Callable[..., Job], tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = submit(*TRAINING, f"output_dir={run}", PROCESSES="2")
    job.until(partial(has_reached, run, 2))
    os.kill(job.nodes()[1], signal.SIGTERM)
    assert job.ended() == 75, job.printed
    assert result(run)["status"] == "stopped"
    assert not (tmp_path / "requeued").exists()


def test_config_error_on_machines_is_reported_once(start: Callable[..., Machine]) -> None:
    machines = [start(node, "output_dir=run", "optimizer.lr=-1") for node in (0, 1)]
    assert [machine.ended() for machine in machines] == [2, 2]
    assert "".join(machine.printed for machine in machines).count("optimizer.lr=-1") == 1


def test_node_script_without_variables_is_refused(start: Callable[..., Machine]) -> None:
    machine = start(0, NODES="", RUN_ID="")
    assert machine.ended() == 2
    assert machine.printed.startswith("error: NODES RUN_ID: no value")


@pytest.mark.parametrize(
    ("arguments", "env", "said"),
    [
        ((), {}, "output_dir has no value that all machines share"),
        (("output_dir=run", "resume=run/checkpoints/step-000003"), {}, "resume: it is always auto here"),
        (("output_dir=run",), {"SLURM_SUBMIT_DIR": "/"}, "/ is not the folder of the program"),
    ],
)
def test_slurm_script_with_wrong_arguments_is_refused(
    submit: Callable[..., Job], arguments: tuple[str, ...], env: dict[str, str], said: str
) -> None:
    job = submit(*arguments, **env)
    assert job.ended() == 2
    assert job.printed.startswith(f"error: {said}")
