"""A run that runs out of memory goes on in smaller parts: the same numbers, alone and together, and after a stop."""

import json
from pathlib import Path

import pytest

from tests.command.test_processes import PLAIN, tensors, with_rate
from tests.model.small import distance
from tests.runs import SMALL, Zygote, metrics, result, same_ending

SCARCE = "tests.scarcity"
LIMITS = {"TOKENS": "40", "CALLS": "40"}  # calls: what is proven and shown before the first step


def told(run: Path) -> list[str]:
    return [line for line in (run / "log.txt").read_text().splitlines() if "out of memory" in line]


@pytest.mark.parametrize(
    ("where", "ranks", "more"),
    [
        ("backward", "1", "batching.packing=true"),
        ("forward", "0", "batching.packing=false"),
        ("recomputed", "01", "training.recompute=true"),
        ("backward", "1", "parallel=zero2"),
    ],
)
def test_one_of_two_processes_runs_out_of_memory(
    zygote: Zygote, tmp_path: Path, where: str, ranks: str, more: str
) -> None:
    command = (*SMALL, *PLAIN, "recipe=lora", more, "training.max_steps=4", with_rate(2))
    enough, scarce = tmp_path / "enough", tmp_path / "scarce"
    for ended in zygote.run_together(tmp_path, 2, *command, f"output_dir={enough}"):
        assert (ended.code, ended.stderr) == (0, "")
    given = LIMITS | {"WHERE": where, "RANKS": ranks, "CALLS": "40" if where == "recomputed" else "20"}
    for ended in zygote.run_together(tmp_path, 2, *command, f"output_dir={scarce}", module=SCARCE, **given):
        assert (ended.code, ended.stderr) == (0, "")
    parts = [int(line.partition("up to ")[2].split()[0]) for line in told(scarce)]
    assert parts
    assert parts[0] in (2, 4)
    assert parts == sorted(set(parts)), "each depth is told once, whichever process reached it first"
    assert told(enough) == []
    for mine, theirs in zip(metrics(enough), metrics(scarce), strict=True):
        for key in mine.keys() - {"tokens_per_second", "peak_memory_bytes"}:
            assert theirs[key] == pytest.approx(mine[key], rel=2e-6), (mine["step"], key)
    left, right = tensors(enough), tensors(scarce)
    assert distance(right, left) <= 1e-6


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


def test_where_nothing_helps_the_message_says_what_takes_memory(zygote: Zygote, tmp_path: Path) -> None:
    given = LIMITS | {"WHERE": "backward", "RANKS": "0", "TOKENS": "3"}
    ended = zygote.run(tmp_path, *SMALL, "output_dir=run", module=SCARCE, **given)
    assert ended.code == 2
    assert "error: out of memory: a document of" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert result(tmp_path / "run")["status"] == "failed"


def test_a_device_that_cannot_hold_the_model_at_all(zygote: Zygote, tmp_path: Path) -> None:
    given = LIMITS | {"WHERE": "forward", "RANKS": "0", "TOKENS": "0", "CALLS": "0"}
    ended = zygote.run(tmp_path, *SMALL, "output_dir=run", module=SCARCE, **given)
    assert ended.code == 2
    assert "error: out of memory: what this run needs outside of its steps does not fit" in ended.stderr
    assert "Traceback" not in ended.stderr
