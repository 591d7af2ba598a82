"""A run that runs out of memory goes on in smaller parts: the same numbers, alone and together, and after a stop."""

import json
from pathlib import Path
from typing import Any

from tests.command.test_processes import PLAIN, with_rate
from tests.harness.runs import SMALL, Zygote, result, same_numbers, tensors
from tests.model.small import distance

SCARCE = "tests.harness.scarcity"
LIMITS: dict[str, Any] = {"TOKENS": "40", "CALLS": "40"}  # calls: what is proven and shown before the first step


def told(run: Path, words: str = "out of memory") -> list[str]:
    return [line for line in (run / "log.txt").read_text().splitlines() if words in line]


def test_one_of_two_processes_runs_out_of_memory(zygote: Zygote, tmp_path: Path) -> None:
    check_one_of_two(zygote, tmp_path, "backward", "1", "batching.packing=true")


def check_one_of_two(zygote: Zygote, tmp_path: Path, where: str, ranks: str, more: str) -> None:
    command = (*SMALL, *PLAIN, "recipe=lora", more, "training.max_steps=4", with_rate(2))
    enough, scarce = tmp_path / "enough", tmp_path / "scarce"
    zygote.finish_together(tmp_path, 2, *command, f"output_dir={enough}")
    given = LIMITS | {"WHERE": where, "RANKS": ranks, "CALLS": "40" if where == "recomputed" else "20"}
    zygote.finish_together(tmp_path, 2, *command, f"output_dir={scarce}", module=SCARCE, **given)
    parts = [int(line.partition("up to ")[2].split()[0]) for line in told(scarce)]
    assert parts
    assert parts[0] in (2, 4)
    assert parts == sorted(set(parts)), "each depth is told once, whichever process reached it first"
    assert told(enough) == []
    same_numbers(enough, scarce, 2e-6)
    assert distance(tensors(scarce), tensors(enough)) <= 1e-6


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
