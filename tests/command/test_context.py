"""Context parallelism: processes that share rows train as one does."""

from pathlib import Path

import pytest

from tests.command.test_processes import PLAIN, with_rate
from tests.harness.runs import SMALL, Zygote, result, same_numbers, tensors
from tests.model.small import distance


def test_two_processes_that_share_rows_give_the_numbers_of_one(zygote: Zygote, tmp_path: Path) -> None:
    shared = result(check_shared_rows(zygote, tmp_path, 2, 2, "recipe=full"))
    assert shared["memory_predicted_bytes"] == pytest.approx(shared["memory_measured_bytes"], rel=0.02)


def check_shared_rows(zygote: Zygote, tmp_path: Path, processes: int, context: int, *words: str) -> Path:
    """Compare a run whose processes share rows with that of one process; return its folder."""
    command = (*SMALL, *PLAIN, *words, "training.max_steps=3")
    one, all_of = tmp_path / "one", tmp_path / "all"
    zygote.finish(tmp_path, *command, with_rate(1), f"output_dir={one}")
    shared = (with_rate(processes // context), f"parallel.context={context}", f"output_dir={all_of}")
    zygote.finish_together(tmp_path, processes, *command, *shared)
    same_numbers(one, all_of)
    left, right = tensors(one), tensors(all_of)
    assert distance([right[name] for name in left], list(left.values())) <= 1e-6
    return all_of
