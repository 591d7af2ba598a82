"""What only two GPUs can show: processes over NCCL train as one does, and go on after one of them was killed."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.command.test_processes import GONE, PLAIN, Launched, with_rate
from tests.harness.marks import requires_two_gpus
from tests.harness.runs import SMALL, metrics, result, tensors
from tests.model.small import distance

pytestmark = requires_two_gpus

COMMON = tuple(setting for setting in SMALL if not setting.startswith("precision="))
# Bins are the same ones however many processes share them, so only sums over bins round differently. In bf16 what
# that moves in the weights may flip a rounding of the next step's activations; atomic additions differ in any case.
LOSS = {"fp32": 1e-5, "bf16": 5e-3}
WEIGHTS = {"fp32": 1e-4, "bf16": 2e-2}


def visible(env: dict[str, str], count: int) -> dict[str, str]:
    """The environment with the first `count` of its GPUs."""
    given = [each for each in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    return env | {"CUDA_VISIBLE_DEVICES": ",".join((given or ["0", "1"])[:count])}


def trained(folder: Path, env: dict[str, str], gpus: int, *command: str) -> Path:
    """The folder of a run that took every GPU it saw, and came to its end."""
    run = folder / f"with-{gpus}"
    started = Launched(folder, visible(env, gpus), *command, "launch.num_processes=auto", f"output_dir={run}")
    assert started.ended(within=300) == (0, "")
    choices = json.loads((run / "manifest.json").read_text())["choices"]
    assert (choices["device"], choices["processes"]) == ("cuda", gpus)
    return run


def same_losses(one: Path, other: Path, tolerance: float) -> None:
    for mine, theirs in zip(metrics(one), metrics(other), strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine.keys() & {"step", "loss", "eval_loss", "tokens", "trained_tokens"}:
            assert theirs[key] == pytest.approx(mine[key], rel=tolerance), (mine["step"], key)


def same_adapters(one: Path, other: Path, tolerance: float) -> None:
    left, right = tensors(one), tensors(other)
    for half in ("lora_A", "lora_B"):
        names = [name for name in left if half in name]
        assert names
        assert distance([right[n] for n in names], [left[n] for n in names]) <= tolerance


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recipe", ["lora", "qlora"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_gpus_give_the_numbers_of_one(
    app_env: dict[str, str], tmp_path: Path, recipe: str, precision: str, parallel: str
) -> None:
    """Plain gradient descent: LoRA's B begins at zero, so what comes out is the sum of the gradients."""
    command = (*COMMON, *PLAIN, f"recipe={recipe}", f"precision={precision}", "training.max_steps=3")
    one, two = (
        trained(tmp_path, app_env, count, *command, f"parallel={parallel}", with_rate(count)) for count in (1, 2)
    )
    same_losses(one, two, LOSS[precision])
    same_adapters(one, two, WEIGHTS[precision])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("parallel", ["ddp", "zero2", "fsdp"])
def test_whole_models_have_the_numbers_of_one_gpu(
    app_env: dict[str, str], tmp_path: Path, parallel: str, precision: str
) -> None:
    command = (*COMMON, *PLAIN, "recipe=full", f"precision={precision}", "training.max_steps=3")
    one, two = (
        trained(tmp_path, app_env, count, *command, f"parallel={parallel}", with_rate(count)) for count in (1, 2)
    )
    same_losses(one, two, LOSS[precision])
    left, right = tensors(one), tensors(two)
    assert distance(list(right.values()), list(left.values())) <= WEIGHTS[precision]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_other_and_the_run_goes_on(
    app_env: dict[str, str], tmp_path: Path, victim: int
) -> None:
    """With QLoRA's paged states, and steps after the kill that the whole run made too."""
    env = visible(app_env, 2)
    command = (*COMMON, "recipe=qlora", "precision=fp32", "batching.accumulation=1", "training.epochs=1")
    whole = trained(tmp_path, app_env, 2, *command)
    killed = tmp_path / "killed"
    again = (*command, "launch.num_processes=auto", f"output_dir={killed}", "resume=auto")
    first = Launched(tmp_path, env, *again)
    first.until(killed, 7)
    os.kill(first.worker(victim), signal.SIGKILL)
    code, said = first.ended()
    assert code == GONE
    assert said == f"process {victim} of 2 was killed by SIGKILL (usually out of memory).\n"
    assert Launched(tmp_path, env, *again).ended(within=300) == (0, "")
    assert result(killed)["status"] == "finished"
    same_losses(whole, killed, LOSS["fp32"])
    same_adapters(whole, killed, WEIGHTS["fp32"])
