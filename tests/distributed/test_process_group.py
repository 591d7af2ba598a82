"""What a runtime remarks on the machine that it was started on."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from app.config.schema import LaunchConfig
from app.distributed import launch
from app.distributed.process_group import HostGroup, Runtime, machine_notes, start
from tests.harness.composed import composed
from tests.harness.runs import Zygote


@pytest.mark.parametrize(
    ("gpus", "processes", "kind", "note"),
    [
        (0, 1, "ddp", ""),
        (0, 3, "ddp", "3 processes share 2 cores; more processes than cores are not"),
        (0, 1, "fsdp", "parallel=fsdp has no effect with one process"),
        (2, 1, "ddp", "1 of 2 visible GPUs used"),
        (4, 4, "fsdp", ""),
    ],
)
def test_machine_notes(gpus: int, processes: int, kind: str, note: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": 0, "WORLD_SIZE": processes, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": processes}
    for name, value in {**variables, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    notes = list(machine_notes(composed(f"parallel={kind}").parallel, processes))
    assert len(notes) == bool(note)
    assert all(text.startswith(note) for text in notes)


def test_accelerate_does_not_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment would divide our loss, or choose a precision of its own."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    runtime = start(LaunchConfig(num_processes=1, threads=1), "fp32", seed=3)
    assert runtime.accelerator.gradient_accumulation_steps == 1
    assert runtime.accelerator.mixed_precision == "no"
    loss = torch.ones((), requires_grad=True)
    runtime.accelerator.backward(loss * 1.0)
    assert float(loss.grad or 0) == 1.0
    assert (runtime.processes, runtime.rank, runtime.threads) == (1, 0, 1)
    assert runtime.host_group.totals([1, 2.5]) == [1.0, 2.5]
    assert runtime.peak_memory_bytes() > 10_000_000
    drawn = torch.rand(2)
    start(LaunchConfig(num_processes=1, threads=1), "fp32", seed=3)
    assert torch.equal(torch.rand(2), drawn)


def main() -> None:
    """One of two processes whose thread is late to the store; it ends with 9 if the environment is emptied before."""
    connect: Any = launch._store
    clear = os.environ.clear
    reached = []

    def late(*arguments: Any) -> Any:
        time.sleep(0.5)
        reached.append(connect(*arguments))
        return reached[0]

    def cleared(_environment: Any) -> None:
        if not reached:
            os._exit(9)
        clear()

    vars(launch)["_store"] = late
    environment: Any = type(os.environ)
    environment.clear = cleared
    start(LaunchConfig(num_processes=1, threads=1), "fp32", seed=3).leave()
    assert reached


def test_environment_is_not_emptied_while_a_thread_reads_it(zygote: Zygote, tmp_path: Path) -> None:
    """A thread that reads what another one changes may end the process by a segmentation fault."""
    zygote.run_together(tmp_path, 2, module="tests.distributed.test_process_group", code=0)


def test_seed_draws_other_dropout_on_each_rank() -> None:
    draws = []
    for rank in (0, 1, 0):
        Runtime(None, torch.device("cpu"), HostGroup(rank=rank, count=2), 1).seed(3)
        draws.append(torch.rand(4))
    assert draws[0].equal(draws[2])
    assert not draws[0].equal(draws[1])
