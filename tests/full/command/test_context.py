"""Context parallelism with adapters, sharding, gradient checkpointing and up to four processes."""

from pathlib import Path

import pytest

from tests.command.test_context import check_shared_rows
from tests.harness.runs import Zygote

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
    check_shared_rows(zygote, tmp_path, processes, context, *words)
