"""The newest checkpoint is the one saved or gone back to last, whatever its step and the times of its files."""

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.errors import CheckpointError, EnvironmentProblem
from app.files import report_write_errors
from app.training.checkpoint import Progress, find_checkpoint
from app.training.train_step import Stepper
from tests.training.test_checkpoint import ALONE, checkpoints, saved, with_valid_hashes


@dataclass
class Branch:
    """Saves of a run, some of which are damaged; then a start that goes on from one of them and saves again."""

    saves: tuple[int, ...]
    resumed: int
    then: int
    left: tuple[int, ...]
    damaged: tuple[int, ...] = ()
    best: int = 0
    keep: int = 2
    counted: bool = True  # false: saved by a version that kept no count


BRANCHES = {
    "newest first": Branch((2, 4, 6), resumed=6, then=8, left=(6, 8)),
    "back to an earlier step": Branch((2, 4, 6), resumed=2, then=3, left=(2, 3)),
    "back, and best": Branch((2, 4, 6), resumed=2, then=3, left=(2, 3, 4), best=4),
    "back, without a count": Branch((2, 4, 6), resumed=2, then=3, left=(2, 3), counted=False),
    "one kept": Branch((2, 4), resumed=2, then=3, left=(3,), keep=1),
    "damaged ones do not count": Branch((3, 8, 9), resumed=3, then=5, left=(3, 5), damaged=(8, 9)),
    "damaged ones end": Branch((3, 8, 9, 3, 4), resumed=4, then=5, left=(4, 5), damaged=(8, 9)),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_newest_is_the_last_saved(name: str, stepper: Stepper, folder: Path) -> None:
    branch = BRANCHES[name]
    places = [saved(checkpoints(folder, keep=9), Progress(step=step), stepper) for step in branch.saves]
    for place in places if not branch.counted else ():
        state = json.loads((place / "state.json").read_text())
        with_valid_hashes(place, "state.json", json.dumps({k: v for k, v in state.items() if k != "save"}).encode())
    for step in branch.damaged:
        (folder / f"step-{step:06d}" / "weights.safetensors").write_bytes(b"")
    for age, place in enumerate(reversed(places)):
        os.utime(place, (age, age))  # as after a copy: times of files say nothing

    saver, resumed = checkpoints(folder, branch.keep), folder / f"step-{branch.resumed:06d}"
    saver.load(resumed, stepper, ALONE)
    saver.note_resumed(resumed)
    assert find_checkpoint(folder, "auto") == (resumed, [])
    newest = saved(saver, Progress(step=branch.then, best_step=branch.best), stepper)
    assert sorted(int(save.name.removeprefix("step-")) for save in folder.glob("step-*")) == list(branch.left)
    assert find_checkpoint(folder, "auto") == (newest, [])
    assert find_checkpoint(folder.parent / "elsewhere", str(folder.parent)) == (newest, [])
    with pytest.raises(EnvironmentProblem, match=f"resume={newest}"), report_write_errors(folder.parent / "log.txt"):
        raise OSError(errno.ENOSPC, "")


def test_run_that_goes_on_elsewhere_begins_there_until_it_has_saved(stepper: Stepper, folder: Path) -> None:
    place, other = saved(checkpoints(folder), Progress(step=2), stepper), folder.parent / "other" / "checkpoints"
    other.parent.mkdir()
    saver = checkpoints(other)
    saver.note_resumed(place)
    assert find_checkpoint(other, "auto")[0] == place
    place.rename(folder / "moved")
    with pytest.raises(CheckpointError, match=f"{other} has no checkpoint yet, and {place}, from which"):
        find_checkpoint(other, "auto")
    newest = saved(saver, Progress(step=3), stepper)
    assert find_checkpoint(other, "auto") == (newest, [])
