"""Context parallelism with adapters, sharding, gradient checkpointing and up to four processes."""

from pathlib import Path

import pytest

from tests.command.test_context import check_shared_rows
from tests.command.test_processes import with_rate
from tests.full.command.test_fsdp import PLAIN, WIDE, starts
from tests.harness.runs import SMALL, Zygote, result, same_ending, same_numbers

UNEVEN = ("batching.tokens=150", "dataset.max_length=150")  # not a multiple of four
RECOMPUTED = ("training.recompute=true", "training.tile=32")


@pytest.mark.parametrize(
    ("processes", "context", "words"),
    [
        (4, 4, ("recipe=lora", *UNEVEN)),  # more processes than key heads
        (4, 2, ("recipe=qlora", *RECOMPUTED)),  # two groups, each with rows of its own
        (4, 4, ("recipe=full", "parallel=ddp", *UNEVEN)),
        (2, 2, ("recipe=qlora", "parallel=fsdp", "training.recompute=1")),
        (4, 2, ("recipe=full", "parallel=fsdp")),
    ],
)
def test_processes_that_share_rows_give_the_numbers_of_one(
    zygote: Zygote, tmp_path: Path, processes: int, context: int, words: tuple[str, ...]
) -> None:
    shared = result(check_shared_rows(zygote, tmp_path, processes, context, *words))
    if "parallel=fsdp" not in words:  # whose estimate is less exact for so small a model, also with whole rows
        # all labels may be in one slice, so the estimate is an upper bound
        assert shared["memory_measured_bytes"] <= 1.02 * shared["memory_predicted_bytes"]


def test_run_resumes_with_and_without_shared_rows(zygote: Zygote, tmp_path: Path) -> None:
    """Bit for bit with the same processes, and with the numbers of one process if that goes on alone."""
    whole, same, alone = (tmp_path / name for name in ("whole", "same", "alone"))
    command = (*SMALL, "recipe=lora", "batching.accumulation=2", "training.max_steps=4")
    shared = (*command, "parallel.context=2")
    zygote.run_together(tmp_path, 2, *shared, f"output_dir={whole}", code=0)
    for run in (same, alone):
        zygote.run_together(tmp_path, 2, *shared, "training.stop_after=2", f"output_dir={run}", code=75)
    zygote.run_together(tmp_path, 2, *shared, f"output_dir={same}", "resume=auto", code=0)
    same_ending(whole, same)
    zygote.finish(tmp_path, *command, f"output_dir={alone}", "resume=auto")
    same_numbers(whole, alone, 1e-5)


def test_out_of_memory_resumes_in_smaller_parts(zygote: Zygote, tmp_path: Path) -> None:
    """One process cannot repeat a pass that the other is in, so both start again."""
    command = (*WIDE, *PLAIN, "recipe=full", "training.max_steps=4", "checkpoint.every=2")
    shared = "parallel=ddp parallel.context=2"
    enough = (*command, *shared.split(), with_rate(2), f"output_dir={tmp_path / 'enough'}")
    zygote.run_together(tmp_path, 2, *enough, code=0)
    limits = {"WHERE": "backward", "RANKS": "1", "TOKENS": "24", "CALLS": "36"}  # slices of bins have 32 tokens
    depths = [depth for depth, _ in starts(zygote, tmp_path, 2, command, shared, **limits)]
    assert depths == list(range(1, len(depths) + 1)) != []
    same_numbers(tmp_path / "enough", tmp_path / "scarce", 2e-6)


def test_finished_run_is_evaluated_by_one_process(zygote: Zygote, tmp_path: Path) -> None:
    """Padded rows are no problem: an evaluation does not slice them."""
    run = tmp_path / "run"
    command = (*SMALL, "recipe=lora", "training.max_steps=2", "parallel.context=2", f"output_dir={run}")
    zygote.run_together(tmp_path, 2, *command, code=0)
    zygote.run(tmp_path, f"run={run}", "batching.packing=false", module="app.evaluate", code=0)
