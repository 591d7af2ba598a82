"""Several processes train as one does: the same numbers, the same files, one message when something is wrong."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.command.test_processes import check_killed_and_resumed, check_two_against_one
from tests.conftest import REPO
from tests.runs import SMALL, Zygote, numbers


@pytest.mark.parametrize(
    ("recipe", "packing", "parallel"),
    [
        *product(("lora", "qlora"), ("true", "false"), ("auto",)),
        ("full", "false", "auto"),
        ("full", "true", "zero2"),
        ("lora", "false", "zero2"),
    ],
)
def test_two_processes_give_the_numbers_of_one(
    zygote: Zygote, tmp_path: Path, recipe: str, packing: str, parallel: str
) -> None:
    check_two_against_one(zygote, tmp_path, recipe, packing, parallel)


@pytest.mark.parametrize(
    ("recipe", "count", "more"),
    [
        ("lora", 2, "adapter.dropout=0.1"),
        ("full", 3, "batching.packing=false"),
        ("qlora", 2, "training.recompute=true"),
    ],
)
def test_a_killed_process_ends_the_others_and_the_run_goes_on_to_the_last_bit(
    zygote: Zygote, tmp_path: Path, recipe: str, count: int, more: str
) -> None:
    check_killed_and_resumed(zygote, tmp_path, recipe, count, more)


@pytest.mark.parametrize("starter", ["torchrun", "accelerate"])
def test_the_ordinary_launchers_work(tmp_path: Path, app_env: dict[str, str], starter: str) -> None:
    run = tmp_path / "run"
    command = {
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
        "accelerate": ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"],
    }[starter]
    command = [
        *command,
        *(["--mixed_precision=no", "--dynamo_backend=no"] if starter == "accelerate" else []),
    ]
    done = subprocess.run(
        [sys.executable, *command, "-m", "app.train", *SMALL, "training.max_steps=2", f"output_dir={run}"],
        env=app_env | {"PYTHONPATH": str(REPO)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert len(numbers(run)) == 3
    assert json.loads((run / "manifest.json").read_text())["choices"]["processes"] == 2
