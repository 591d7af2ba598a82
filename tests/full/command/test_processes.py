"""Several processes train as one does: the same numbers, the same files, one message when something is wrong."""

import json
import os
import shlex
import signal
import time
from pathlib import Path

import pytest

from app.signals import NOTHING_TO_SAVE
from tests.command.test_processes import GONE, PLAIN, Launched, check_two_against_one, with_rate
from tests.harness.python import printed_by
from tests.harness.runs import SMALL, Zygote, metrics, numbers, result, same_ending, tensors, wait_until
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
    assert "with messages of another weight than 1" in (one / "log.txt").read_text()
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
    assert shlex.split(first.last_line())[1:] == ["-m", "app.train", *launched_with]
    assert result(run)["status"] == "stopped"

    second = Launched(tmp_path, app_env, *launched_with)
    second.until(run, result(run)["steps"] + 2 if (run / "result.json").exists() else 8)
    os.kill(second.worker(1), signal.SIGKILL)
    code, said = second.ended()
    assert code == GONE
    assert said == "process 1 of 2 was killed by SIGKILL. Out of memory is the usual cause.\n"

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
