"""Planned peaks of sharded runs against counted peaks of one of their processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from app.distributed.fsdp import mesh_sizes_of
from app.distributed.process_group import HostGroup, Runtime
from app.memory.estimate import plan_memory
from app.memory.phases import EVALUATION
from tests.conftest import REPO
from tests.memory.truth import PACKED, counted_peaks, small_run

PROCESSES = 2
NEAR = 4096
CASES: dict[str, tuple[str, ...]] = {
    "full": ("recipe=full", "parallel=fsdp", "training.recompute=0"),
    "full recomputed, zero2": ("recipe=full", "parallel=zero2", "training.recompute=1"),
    "full bf16, muon": ("recipe=full", "parallel=fsdp", "optimizer=muon", "precision=bf16"),
    "full offload": ("recipe=full", "parallel=fsdp", "parallel.offload=true"),
    "lora": ("recipe=lora", "parallel=fsdp", "training.recompute=0", "precision=bf16"),
    "lora recomputed, zero2": ("recipe=lora", "parallel=zero2", "training.recompute=true"),
    "qlora": ("recipe=qlora", "parallel=fsdp", "training.recompute=0"),
    "qlora recomputed, bf16": ("recipe=qlora", "parallel=fsdp", "training.recompute=1", "precision=bf16"),
    "qlora, zero2": ("recipe=qlora", "parallel=zero2", "training.recompute=0"),
}


def main(rank: int, folder: Path) -> None:
    """Count all cases in one of the processes."""
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    host = HostGroup(rank, PROCESSES, torch.distributed.new_group(backend="gloo"))
    runtime = Runtime(None, torch.device("cpu"), host, 1)
    found = {name: counted_peaks(small_run(*words), PACKED, runtime, repeats=6) for name, words in CASES.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    """Peaks of the first process, in a step and in an evaluation."""
    folder = tmp_path_factory.mktemp("counted")
    processes = [
        subprocess.Popen([sys.executable, "-m", "tests.full.memory.test_sharded", str(rank), str(folder)], cwd=REPO)
        for rank in range(PROCESSES)
    ]
    assert [process.wait(300) for process in processes] == [0] * PROCESSES
    found: dict[str, tuple[int, int]] = json.loads((folder / "0.json").read_text())
    return found


@pytest.mark.parametrize("name", CASES)
def test_plan_of_sharded_run_equals_counted_step(name: str, counted: dict[str, tuple[int, int]]) -> None:
    run = small_run(*CASES[name])
    sizes = mesh_sizes_of(run.parallel, PROCESSES, PROCESSES)
    plan = plan_memory(run, PACKED, "cpu", exact=True, mesh_sizes=sizes)
    in_step, in_evaluation = counted[name]
    assert abs(plan.peak_bytes - in_step) <= NEAR
    assert abs(plan.phases[EVALUATION] - in_evaluation) <= NEAR


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
