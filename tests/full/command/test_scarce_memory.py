"""A run that runs out of memory goes on in smaller parts: the same numbers, alone and together, and after a stop."""

import json
from pathlib import Path

import pytest

from tests.command.test_scarce_memory import LIMITS, SCARCE, check_one_of_two
from tests.harness.runs import SMALL, Zygote, same_ending


def test_a_stopped_run_goes_on_in_parts_to_the_last_bit(zygote: Zygote, tmp_path: Path) -> None:
    command = (*SMALL, "recipe=full", "training.max_steps=6", "checkpoint.every=2")
    given = LIMITS | {"WHERE": "forward", "RANKS": "0"}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert zygote.run(tmp_path, *command, f"output_dir={whole}", module=SCARCE, **given).code == 0
    again = (*command, f"output_dir={stopped}", "resume=auto")
    first = zygote.run(tmp_path, *again, "training.stop_after=4", module=SCARCE, **given)
    assert first.code == 75, first.stderr
    (state,) = (stopped / "checkpoints").glob("step-000004/state.json")
    assert json.loads(state.read_text())["progress"]["depth"] > 0
    assert zygote.run(tmp_path, *again).code == 0, "with memory enough it keeps to its parts"
    same_ending(whole, stopped)


def test_a_device_that_cannot_hold_the_model_at_all(zygote: Zygote, tmp_path: Path) -> None:
    given = LIMITS | {"WHERE": "forward", "RANKS": "0", "TOKENS": "0", "CALLS": "0"}
    ended = zygote.run(tmp_path, *SMALL, "output_dir=run", module=SCARCE, **given)
    assert ended.code == 2
    assert "error: out of memory: what this run needs outside of its steps does not fit" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("where", "ranks", "more"),
    [
        ("forward", "0", "batching.packing=false"),
        ("recomputed", "01", "training.recompute=true"),
        ("backward", "1", "parallel=ddp"),
    ],
)
def test_one_of_two_processes_runs_out_of_memory(
    zygote: Zygote, tmp_path: Path, where: str, ranks: str, more: str
) -> None:
    check_one_of_two(zygote, tmp_path, where, ranks, more)
