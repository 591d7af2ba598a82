"""A run that is killed, or gets an error of the disk, at any change of a file goes on to the same bits."""

import random
import signal
from pathlib import Path

import pytest

from tests.harness.runs import SMALL, Ended, Zygote, same_ending

MODULE = "tests.full.command.file_events"
SHORT = ("dataset.max_rows=24", "dataset.eval_max_rows=4", "training.max_steps=4", "checkpoint.every=2")
EVENTS = ("kill", "kill", "kill", "ENOSPC", "EIO", "EACCES")


@pytest.mark.parametrize(
    "recipe",
    [
        ("recipe=lora", "adapter.dropout=0.1", "batching.accumulation=3"),
        ("recipe=full", "precision=bf16", "precision.trained=bf16"),
        ("recipe=qlora", "training.recompute=true"),
        ("recipe=full", "optimizer=muon", "batching.packing=false"),
        ("recipe=lora", "checkpoint.final=best", "eval.every=1"),
    ],
    ids=lambda recipe: recipe[1],
)
def test_event_at_a_change_of_a_file_resumes_bit_for_bit(zygote: Zygote, tmp_path: Path, recipe: tuple[str]) -> None:
    command = (*SMALL, *SHORT, *recipe, "output_dir=run", "resume=auto")
    folders = [tmp_path / name for name in ("whole", *map(str, range(len(EVENTS))))]
    for folder in folders:
        folder.mkdir()
    whole, *others = folders
    ended = zygote.run(whole, "count", "events", *command, module=MODULE, code=0)
    moments = random.Random(" ".join(recipe)).sample(range(1, int((whole / "events").read_text())), len(EVENTS))
    todo = list(zip(others, EVENTS, moments, strict=True))
    for pair in (todo[i : i + 2] for i in range(0, len(todo), 2)):  # as many as there are cores
        hurt = [zygote.start(folder, what, str(moment), *command, module=MODULE) for folder, what, moment in pair]
        for run, (_, what, moment) in zip(hurt, pair, strict=True):
            check_end(what, moment, run.wait())
        resumed = [zygote.start(folder, *command) for folder, _, _ in pair]
        for run, (folder, what, moment) in zip(resumed, pair, strict=True):
            ended = run.wait()
            assert ended.code == 0, f"{what} {moment}: {ended.stderr}"
            same_ending(whole / "run", folder / "run")


def check_end(what: str, moment: int, ended: Ended) -> None:
    """Some errors are of files that a run can do without."""
    if what == "kill":
        assert ended.code == -signal.SIGKILL
    else:
        assert ended.code in (0, 2), f"{what} {moment}: {ended.stderr}"
        assert "Traceback" not in ended.stdout + ended.stderr, f"{what} {moment}"
        assert ended.stderr.startswith("error: ") == (ended.code == 2)
