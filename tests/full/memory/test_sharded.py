"""Planned peaks of sharded runs against counted peaks of one of their processes."""

import pytest

from app.distributed.fsdp import mesh_sizes_of
from app.distributed.process_group import Runtime
from app.memory.estimate import plan_memory
from app.memory.trace import EVALUATION
from tests.harness.processes import ProcessesByCount
from tests.memory.truth import PACKED, counted_peaks, small_run

PROCESSES = 2
NEAR = 4096
CASES: dict[str, tuple[str, ...]] = {
    "full": ("recipe=full", "parallel=fsdp", "training.recompute=0"),
    "full recomputed, zero2": ("recipe=full", "parallel=zero2", "training.recompute=1"),
    "full offload": ("recipe=full", "parallel=fsdp", "parallel.offload=true"),
    "lora": ("recipe=lora", "parallel=fsdp", "training.recompute=0", "precision=bf16"),
    "lora recomputed, zero2": ("recipe=lora", "parallel=zero2", "training.recompute=true"),
    "qlora": ("recipe=qlora", "parallel=fsdp", "training.recompute=0"),
    "qlora recomputed, bf16": ("recipe=qlora", "parallel=fsdp", "training.recompute=1", "precision=bf16"),
    "qlora, zero2": ("recipe=qlora", "parallel=zero2", "training.recompute=0"),
}


def counted(runtime: Runtime, *words: str) -> tuple[int, int]:
    """In one of the processes: its peaks in a step and in an evaluation."""
    return counted_peaks(small_run(*words), PACKED, runtime, repeats=6)


@pytest.mark.parametrize("name", CASES)
def test_plan_of_sharded_run_equals_counted_step(name: str, processes: ProcessesByCount) -> None:
    run = small_run(*CASES[name])
    sizes = mesh_sizes_of(run.parallel, PROCESSES, PROCESSES)
    plan = plan_memory(run, PACKED, "cpu", exact=True, mesh_sizes=sizes)
    in_step, in_evaluation = processes(PROCESSES).run(counted, *CASES[name])[0]
    assert abs(plan.peak_bytes - in_step) <= NEAR
    assert abs(plan.phases[EVALUATION] - in_evaluation) <= NEAR
