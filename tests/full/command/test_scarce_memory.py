"""A run that runs out of memory goes on in smaller parts: the same numbers, alone and together, and after a stop."""

import json
from pathlib import Path

import pytest

from tests.command.test_processes import PLAIN, with_rate
from tests.command.test_scarce_memory import FEW, LIMITS, PADDED, SCARCE, told
from tests.harness.runs import SMALL, Zygote, result, same_ending, same_numbers, tensors
from tests.model.small import distance
from tests.training.test_rehearsal import files


def test_a_stopped_run_goes_on_in_parts_to_the_last_bit(zygote: Zygote, tmp_path: Path) -> None:
    command = (*SMALL, "recipe=full", "training.max_steps=6", "checkpoint.every=2")
    given = LIMITS | {"WHERE": "forward", "RANKS": "0"}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert zygote.run(tmp_path, *command, f"output_dir={whole}", module=SCARCE, **given).code == 0
    again = (*command, f"output_dir={stopped}", "resume=auto")
    zygote.run(tmp_path, *again, "training.stop_after=4", module=SCARCE, **given, code=75)
    (state,) = (stopped / "checkpoints").glob("step-000004/state.json")
    assert json.loads(state.read_text())["progress"]["depth"] > 0
    assert zygote.run(tmp_path, *again).code == 0, "with memory enough it keeps to its parts"
    same_ending(whole, stopped)


def test_a_device_that_cannot_hold_the_model_at_all(zygote: Zygote, tmp_path: Path) -> None:
    given = LIMITS | {"WHERE": "forward", "RANKS": "0", "TOKENS": "0", "CALLS": "0"}
    ended = zygote.run(tmp_path, *SMALL, "output_dir=run", module=SCARCE, **given, code=2)
    assert "error: out of memory: a check of the model on " in ended.stderr
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
    command = (*SMALL, *PLAIN, "recipe=lora", more, "training.max_steps=4", with_rate(2))
    enough, scarce = tmp_path / "enough", tmp_path / "scarce"
    zygote.finish_together(tmp_path, 2, *command, f"output_dir={enough}")
    calls = {"forward": "32", "recomputed": "40", "backward": "20"}[where]
    given = LIMITS | {"WHERE": where, "RANKS": ranks, "CALLS": calls}
    zygote.finish_together(tmp_path, 2, *command, f"output_dir={scarce}", module=SCARCE, **given)
    parts = [int(line.partition("up to ")[2].split()[0]) for line in told(scarce)]
    assert parts
    assert parts[0] in (2, 4)
    assert parts == sorted(set(parts)), "each depth is told once, whichever process reached it first"
    assert told(enough) == []
    same_numbers(enough, scarce, 2e-6)
    assert distance(tensors(scarce), tensors(enough)) <= 1e-6


def test_rehearsal_of_two_processes_changes_no_byte(zygote: Zygote, tmp_path: Path) -> None:
    """Mid-epoch, with dropout: each start rehearses, and both processes take part in its reduction."""
    command = (*FEW, "recipe=lora", "adapter.dropout=0.1", "batching.accumulation=1")
    plain, tried = tmp_path / "plain", tmp_path / "tried"
    zygote.finish_together(tmp_path, 2, *command, f"output_dir={plain}")
    again = (*command, "training.rehearse=true", "resume=auto", f"output_dir={tried}")
    for code, more in ((75, ("training.stop_after=2",)), (0, ())):
        for ended in zygote.run_together(tmp_path, 2, *again, *more):
            assert (ended.code, ended.stderr) == (code, "")
    same_ending(plain, tried)
    names = ("weights.safetensors", "optimizer.safetensors", "random.safetensors", "state.json")
    saves = [files(run / "checkpoints" / "step-000004") for run in (plain, tried)]
    assert all(saves[0][name] == saves[1][name] for name in names)
    assert [line.partition("): ")[2] for line in told(tried, "rehearsed")] == ["it fits", "it fits"]
    assert told(plain, "rehearsed") == []
    assert json.loads((tried / "manifest.json").read_text())["rehearsal"]["depth"] == 0


def test_rehearsal_out_of_memory_ends_the_run_early(zygote: Zygote, tmp_path: Path) -> None:
    given = {"WHERE": "backward", "RANKS": "0", "TOKENS": "3", "CALLS": "32"}
    words = (*FEW, *PADDED, "training.rehearse=true", "output_dir=run")
    ended = zygote.run(tmp_path, *words, module=SCARCE, **given, code=2)
    assert "error: out of memory: a document of" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "step 1/" not in ended.stdout
    assert result(tmp_path / "run")["status"] == "failed"
