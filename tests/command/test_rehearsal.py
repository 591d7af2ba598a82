"""training.rehearse in real runs: two processes, before the first step of every start, with memory and without."""

import json
from pathlib import Path

from tests.harness.runs import SMALL, Zygote

FEW = (*SMALL, "training.max_steps=4", "checkpoint.every=2", "eval.samples=0")
PADDED = ("recipe=lora", "batching.packing=false")  # nothing goes backward before the rehearsal


def told(run: Path) -> list[str]:
    return [line for line in (run / "log.txt").read_text().splitlines() if "rehearsed" in line]


def test_one_of_two_processes_learns_before_the_first_step_that_memory_is_short(zygote: Zygote, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = (*FEW, *PADDED, "batching.accumulation=1", "training.rehearse=true", f"output_dir={run}")
    given = {"WHERE": "backward", "RANKS": "1", "TOKENS": "150", "CALLS": "0"}
    for ended in zygote.run_together(tmp_path, 2, *command, module="tests.harness.scarcity", **given):
        assert (ended.code, ended.stderr) == (0, "")
    (line,) = told(run)
    assert "it fits only in parts: from the first step on" in line
    log = (run / "log.txt").read_text()
    assert "out of memory, so micro-batches" not in log, "no step has to learn it"
    state = json.loads((run / "checkpoints" / "step-000004" / "state.json").read_text())
    assert state["progress"]["depth"] > 0
