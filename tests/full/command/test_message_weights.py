"""A run on messages of different weights gives the same numbers in one process or two, at once or continued."""

import json
from pathlib import Path

import pytest

from tests.command.test_processes import PLAIN, with_rate
from tests.harness.runs import SMALL, Zygote, metrics, same_ending, tensors
from tests.model.small import distance
from tests.training.test_message_weights import WEIGHTS, chats

LOSSES = ("loss", "eval_loss", "grad_norm", "trained_tokens")


def test_message_weights_with_two_processes_and_resume(zygote: Zygote, tmp_path: Path) -> None:
    """Plain gradient descent, and bins of very different weights on each process."""
    data = tmp_path / "chat.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in chats(WEIGHTS)))
    words = ("dataset=messages", f"dataset.path={data}", "dataset.eval_fraction=0.3", "training.max_steps=4")
    small = (word for word in SMALL if not word.startswith(("dataset.max_length=", "batching.tokens=")))
    command = (*small, *PLAIN, *words, "dataset.max_length=128", "batching.tokens=128", "recipe=full")
    one, two, parted = tmp_path / "one", tmp_path / "two", tmp_path / "parted"
    zygote.finish(tmp_path, *command, with_rate(1), f"output_dir={one}")
    zygote.finish_together(tmp_path, 2, *command, with_rate(2), f"output_dir={two}")
    assert "with messages of another weight than 1" in (one / "log.txt").read_text()
    for mine, theirs in zip(metrics(one), metrics(two), strict=True):
        for key in mine.keys() & LOSSES:
            assert theirs[key] == pytest.approx(mine[key], rel=1e-6), (mine["step"], key)
    left, right = tensors(one), tensors(two)
    assert distance([right[name] for name in left], list(left.values())) <= 1e-6

    again = (*command, with_rate(1), f"output_dir={parted}", "resume=auto")
    zygote.run(tmp_path, *again, "training.stop_after=3", code=75)
    zygote.run(tmp_path, *again, code=0)
    same_ending(one, parted)
