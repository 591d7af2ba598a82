"""Several processes and machines: the same numbers as one, and restarts after failures."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from app.signals import NOTHING_TO_SAVE
from tests.command.test_processes import GONE, PLAIN, Launched, check_two_against_one, with_rate
from tests.full.command.machines import SCRIPTS, Job, Machine, free_job, of_two_machines, processes_of
from tests.harness.python import printed_by
from tests.harness.runs import SMALL, Zygote, has_reached, metrics, numbers, result, same_ending, tensors, wait_until
from tests.model.small import distance
from tests.training.test_message_weights import WEIGHTS, chats


@pytest.mark.parametrize(
    ("recipe", "packing", "parallel"), [("qlora", "true", "auto"), ("lora", "false", "auto"), ("qlora", "true", "fsdp")]
)
def test_two_processes_give_the_numbers_of_one(
    zygote: Zygote, tmp_path: Path, recipe: str, packing: str, parallel: str
) -> None:
    check_two_against_one(zygote, tmp_path, recipe, packing, parallel)


@pytest.mark.parametrize(("recipe", "packing", "parallel"), [("dpo", "false", "fsdp"), ("kto", "true", "auto")])
def test_answers_compared_by_two_processes_give_the_losses_of_one(
    zygote: Zygote, tmp_path: Path, recipe: str, packing: str, parallel: str
) -> None:
    """Their reference too is scored by both; rewards are small differences from it."""
    command = (*SMALL, *PLAIN, f"recipe={recipe}", f"batching.packing={packing}", "training.max_steps=3")
    one, two = tmp_path / "one", tmp_path / "two"
    zygote.finish(tmp_path, *command, with_rate(1), f"output_dir={one}", f"cache_dir={tmp_path / 'cache-one'}")
    shared = (f"parallel={parallel}", f"output_dir={two}", f"cache_dir={tmp_path / 'cache-two'}")
    zygote.finish_together(tmp_path, 2, *command, with_rate(2), *shared)
    for mine, theirs in zip(metrics(one), metrics(two), strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine.keys() & {"loss", "eval_loss", "grad_norm"}:
            assert theirs[key] == pytest.approx(mine[key], rel=1e-6)
        for key in mine.keys() & {"chosen_reward", "rejected_reward", "reward_margin"}:
            assert theirs[key] == pytest.approx(mine[key], abs=1e-5)
    left, right = tensors(one), tensors(two)
    updated = [name for name in left if "lora_B" in name]
    assert distance([right[n] for n in updated], [left[n] for n in updated]) <= 1e-6


def test_message_weights_of_two_processes_give_the_numbers_of_one(zygote: Zygote, tmp_path: Path) -> None:
    """Plain gradient descent, and bins of very different weights on each process."""
    data = tmp_path / "chat.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in chats(WEIGHTS)))
    words = ("dataset=messages", f"dataset.path={data}", "dataset.eval_fraction=0.3", "training.max_steps=4")
    small = (word for word in SMALL if not word.startswith(("dataset.max_length=", "batching.tokens=")))
    command = (*small, *PLAIN, *words, "dataset.max_length=128", "batching.tokens=128", "recipe=full")
    one, two = tmp_path / "one", tmp_path / "two"
    zygote.finish(tmp_path, *command, with_rate(1), f"output_dir={one}")
    zygote.finish_together(tmp_path, 2, *command, with_rate(2), f"output_dir={two}")
    assert "with message weights other than 1" in (one / "log.txt").read_text()
    for mine, theirs in zip(metrics(one), metrics(two), strict=True):
        for key in mine.keys() & {"loss", "eval_loss", "grad_norm", "trained_tokens"}:
            assert theirs[key] == pytest.approx(mine[key], rel=1e-6), (mine["step"], key)
    left, right = tensors(one), tensors(two)
    assert distance([right[name] for name in left], list(left.values())) <= 1e-6


@pytest.mark.parametrize("starter", ["torchrun", "accelerate"])
def test_ordinary_launchers_train(tmp_path: Path, app_env: dict[str, str], starter: str) -> None:
    run = tmp_path / "run"
    command = {
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
        "accelerate": ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"],
    }[starter]
    command = [*command, *(["--mixed_precision=no", "--dynamo_backend=no"] if starter == "accelerate" else [])]
    words = ("-m", "app.train", *SMALL, "training.max_steps=2", f"output_dir={run}")
    printed_by(*command, *words, env=app_env, cwd=tmp_path)
    assert [line["step"] for line in numbers(run)] == [0, 1, 2, 2]
    assert json.loads((run / "manifest.json").read_text())["choices"]["processes"] == 2


def test_option_of_accelerate_that_differs_from_the_run_refused(tmp_path: Path, app_env: dict[str, str]) -> None:
    command = ["-m", "accelerate.commands.launch", "--cpu", "--mixed_precision=bf16", "-m", "app.train", "dry_run=true"]
    ended = subprocess.run([sys.executable, *command], env=app_env, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode
    assert "accelerate launch --mixed_precision=bf16 has no effect." in ended.stderr
    assert "set precision=bf16." in ended.stderr


def test_launcher_forwards_signals_and_reports_a_death_once(
    zygote: Zygote, tmp_path: Path, app_env: dict[str, str]
) -> None:
    command = (*SMALL, "batching.accumulation=1", "training.epochs=2")
    whole, run = tmp_path / "whole", tmp_path / "run"
    zygote.run_together(tmp_path, 2, *command, f"output_dir={whole}", code=0)
    launched_with = (*command, "launch.num_processes=2", f"output_dir={run}", "resume=auto")

    first = Launched(tmp_path, app_env, *launched_with)
    first.until(run, 3)
    first.process.send_signal(signal.SIGTERM)
    assert first.ended() == (75, "")
    assert shlex.split(first.last_line()) == ["finetune", "train", *launched_with]
    assert result(run)["status"] == "stopped"

    second = Launched(tmp_path, app_env, *launched_with)
    second.until(run, result(run)["steps"] + 2 if (run / "result.json").exists() else 8)
    os.kill(second.worker(1), signal.SIGKILL)
    code, said = second.ended()
    assert code == GONE
    assert said == "process 1 of 2 was killed by SIGKILL (usually out of memory).\n"

    third = Launched(tmp_path, app_env, *launched_with)
    assert third.ended() == (0, "")
    same_ending(whole, run)


def test_launcher_killed_before_the_first_step_takes_its_processes_along(
    zygote: Zygote, tmp_path: Path, app_env: dict[str, str]
) -> None:
    """As they are being imported, as they prepare, and by torchrun; then a signal in place of the kill."""
    run = (*SMALL, "training.max_steps=1", "output_dir=run", "resume=auto")
    environment = app_env | {"TMPDIR": str(tmp_path)}
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2")
    for seconds, launcher in ((0.0, ()), (4.0, ()), (2.0, torchrun)):
        own = () if launcher else ("launch.num_processes=2",)
        launched = Launched(tmp_path, environment, *run, *own, launcher=launcher)
        workers = launched.workers(2)
        time.sleep(seconds)
        launched.process.kill()
        launched.process.wait()
        wait_until(lambda: not any(map(is_running, workers)), 30)  # noqa: B023 (waits at once)
        assert launcher or not list(tmp_path.glob("app-launch-*"))
    stopped = Launched(tmp_path, environment, *SMALL, "launch.num_processes=2", "output_dir=stopped")
    stopped.workers(2)
    stopped.process.terminate()
    assert stopped.ended() == (75, NOTHING_TO_SAVE)
    assert not (tmp_path / "stopped").exists()
    assert zygote.run(tmp_path, *run).code == 0


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_foreign_launcher_needs_named_folder_and_decides_number(zygote: Zygote, tmp_path: Path) -> None:
    zygote.run_together(tmp_path, 2, *SMALL, code=2)
    ended = zygote.run_together(tmp_path, 2, *SMALL, "output_dir=run", "launch.num_processes=3")[0]
    assert ended.code == 2
    assert "launch.num_processes=3, but this process was started as one of 2" in ended.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_fault_of_one_process_is_reported_before_they_meet(zygote: Zygote, tmp_path: Path, rank: int) -> None:
    (tmp_path / f"{1 - rank}.jsonl").write_text('{"text": "one"}\n' * 8)
    began = time.monotonic()
    ended = zygote.run_together(
        tmp_path, 2, *SMALL, "dataset=text", "dataset.path=${oc.env:RANK}.jsonl", "output_dir=run"
    )
    assert time.monotonic() - began < 20
    assert [each.code for each in ended] == [2, 2]
    assert ended[rank].stderr.startswith(f"error: dataset.path={rank}.jsonl")
    assert "error: " not in ended[1 - rank].stderr


TRAINING = (*SMALL, "batching.accumulation=1", "training.epochs=2")


@pytest.fixture
def environment(app_env: dict[str, str], tmp_path: Path, quick_python: Path) -> dict[str, str]:
    return app_env | {
        **of_two_machines(tmp_path, quick_python),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
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
    assert again.printed.count("torchrun was killed by signal 9. Starting it again") == 1
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
    assert machine.printed.startswith("error: NODES RUN_ID: not set")


@pytest.mark.parametrize(
    ("arguments", "env", "said"),
    [
        ((), {}, "output_dir= is required, on a disk shared by all machines"),
        (("output_dir=run", "resume=run/checkpoints/step-000003"), {}, "resume= is always auto here"),
        (("output_dir=run",), {"SLURM_SUBMIT_DIR": "/"}, "/ is not the folder of the program"),
    ],
)
def test_slurm_script_with_wrong_arguments_is_refused(
    submit: Callable[..., Job], arguments: tuple[str, ...], env: dict[str, str], said: str
) -> None:
    job = submit(*arguments, **env)
    assert job.ended() == 2
    assert job.printed.startswith(f"error: {said}")
