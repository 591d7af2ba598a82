"""A run that is short of memory goes on in smaller parts, or says what takes memory."""

import json
from pathlib import Path
from typing import Any

from tests.harness.runs import SMALL, Zygote, result

SCARCE = "tests.harness.scarcity"
LIMITS: dict[str, Any] = {"TOKENS": "40", "CALLS": "40"}  # calls: what is proven and shown before the first step


def told(run: Path, words: str = "out of memory") -> list[str]:
    return [line for line in (run / "log.txt").read_text().splitlines() if words in line]


def test_where_nothing_helps_the_message_says_what_takes_memory(zygote: Zygote, tmp_path: Path) -> None:
    given = LIMITS | {"WHERE": "backward", "RANKS": "0", "TOKENS": "3"}
    ended = zygote.run(tmp_path, *SMALL, "output_dir=run", module=SCARCE, **given, code=2)
    assert "error: out of memory: a document of" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert result(tmp_path / "run")["status"] == "failed"


FEW = (*SMALL, "training.max_steps=4", "checkpoint.every=2", "eval.samples=0")
PADDED = ("recipe=lora", "batching.packing=false")  # nothing goes backward before the rehearsal


def test_one_of_two_processes_learns_before_the_first_step_that_memory_is_short(zygote: Zygote, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = (*FEW, *PADDED, "batching.accumulation=1", "training.rehearse=true", f"output_dir={run}")
    given = {"WHERE": "backward", "RANKS": "1", "TOKENS": "150", "CALLS": "0"}
    zygote.finish_together(tmp_path, 2, *command, module=SCARCE, **given)
    (line,) = told(run, "rehearsed")
    assert "it fits only in parts: from the first step on" in line
    log = (run / "log.txt").read_text()
    assert "out of memory, so micro-batches" not in log, "no step has to learn it"
    state = json.loads((run / "checkpoints" / "step-000004" / "state.json").read_text())
    assert state["progress"]["depth"] > 0
