"""Saving a run so that it continues bit for bit, and finding the save that can be trusted."""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.config.schema import CheckpointConfig
from app.distributed import sharded_checkpoint as sharded
from app.distributed.process_group import HostGroup
from app.errors import CheckpointError
from app.files import (
    checksummed_folder,
    remove_temp_dirs,
    report_full_disk,
    temp_dir_of,
    verify_checksums,
)
from app.optim.optimizer_state import flatten, load_state
from app.training.progress import Progress
from app.training.train_step import Stepper
from app.training.trained_state import (
    OPTIMIZER,
    SHARDS,
    WEIGHTS,
    load_divided,
    load_weights,
    named_tensors,
    plain_states,
)

_RANDOM, _STATE, DEPTH = "random.safetensors", "state.json", "depth.json"
_NAME = re.compile(r"step-(\d{6,})$")


def find_checkpoint(folder: Path, resume: str | None, *, tidy: bool = True) -> tuple[Path | None, list[str]]:
    """The save to continue from, with a remark about each one that was passed over; `tidy`: clear up first."""
    if resume is None:
        return None, []
    if tidy:
        remove_temp_dirs(folder)
    if resume != "auto":
        return _trusted(Path(resume)), []
    remarks: list[str] = []
    for save in sorted(_saves(folder), key=_step_of, reverse=True):
        fault = verify_checksums(save)
        if fault is None:
            return save, remarks
        remarks.append(f"{save} is damaged ({fault}); taking the one before")
    if remarks:
        raise CheckpointError(
            f"resume=auto: every checkpoint in {folder} is damaged. "
            "Start again with another output_dir, or move the folder away. " + "; ".join(remarks)
        )
    return None, []


def choices_of(save: Path | None) -> dict[str, str]:
    """What was chosen for the machine when the run began; a continued run keeps it."""
    if save is None:
        return {}
    choices: dict[str, str] = json.loads((save / _STATE).read_text())["choices"]
    return choices


class Checkpoints:
    """The saves of one run. `identity` must be equal for a save to be continued; `choices` were made at the start."""

    def __init__(
        self, folder: Path, config: CheckpointConfig, identity: Mapping[str, Any], choices: Mapping[str, str]
    ) -> None:
        self.folder = folder
        self._config = config
        self._identity = dict(identity)
        self._choices = dict(choices)

    def save(self, progress: Progress, stepper: Stepper, peers: HostGroup) -> None:
        """Write one, whole or not at all, and drop those that are no longer kept. The first process does, for all;
        where the model is divided each writes its parts.
        """
        random = peers.collected(_random_state())
        plains = peers.collected(plain_states(stepper))
        target = self.folder / f"step-{progress.step:06d}"
        sharding = stepper.trainee.sharding
        if peers.rank > 0:
            if sharding is not None:
                peers.wait_for_all()  # the folder is there
                with report_full_disk(target):
                    sharded.save(named_tensors(stepper), temp_dir_of(target) / SHARDS, peers.group)
            return
        state = {
            "identity": self._identity,
            "choices": self._choices,
            "progress": progress.as_dict(),
            "scaler": None if stepper.scale is None else stepper.scale.state_dict(),
        }
        with checksummed_folder(target) as aside:
            if sharding is not None:
                peers.wait_for_all()
                sharded.save(named_tensors(stepper), aside / SHARDS, peers.group)
                state |= {"optimizer": {key: value for each in plains for key, value in each.items()}}
            else:
                tensors, plain = flatten(stepper.optimizer.state_dict())
                _save_tensors(stepper.trainee.trained(), aside / WEIGHTS)
                _save_tensors(tensors, aside / OPTIMIZER)
                state |= {"optimizer": plain}
            save_file(_by_rank(random), aside / _RANDOM)
            (aside / _STATE).write_text(json.dumps(state))
        self._drop_old(progress)

    def load(self, folder: Path, stepper: Stepper, peers: HostGroup) -> Progress:
        """Put everything back as it was after the step of `folder`, saved by any number of processes."""
        state = json.loads((folder / _STATE).read_text())
        self._require_same_run(folder, state["identity"])
        if state.get("optimizers"):
            raise CheckpointError(
                f"resume: {folder} was divided by parallel=zero2 or zero3 of an earlier version, which this one cannot "
                "read. Finish the run with that version, or give another output_dir."
            )
        if stepper.trainee.sharding is None and not (folder / SHARDS).is_dir():
            load_weights(folder, stepper.trainee.trained(), peers)
            load_state(stepper.optimizer, load_file(folder / OPTIMIZER), state["optimizer"])
        else:
            load_divided(folder, state["optimizer"], stepper, peers)
        if stepper.scale is not None:
            stepper.scale.load_state_dict(state["scaler"])
        _set_random_state(load_file(folder / _RANDOM), peers.rank)
        return Progress(**state["progress"])

    def note_depth(self, depth: int) -> None:
        """For the next start, from whichever save: what this one cannot do again, and so finds out too late."""
        self.folder.mkdir(exist_ok=True)
        aside = temp_dir_of(self.folder / f"{os.getpid()}-{DEPTH}")  # several may find it out at once
        aside.write_text(json.dumps(depth))
        aside.rename(self.folder / DEPTH)

    def noted_depth(self) -> int:
        """0 where nothing was noted."""
        file = self.folder / DEPTH
        return int(json.loads(file.read_text())) if file.is_file() else 0

    def best(self, progress: Progress) -> Path | None:
        """The save of the best evaluation, if it is still there and whole."""
        folder = self.folder / f"step-{progress.best_step:06d}"
        return folder if folder.is_dir() and verify_checksums(folder) is None else None

    def _require_same_run(self, folder: Path, saved: Mapping[str, Any]) -> None:
        different = [
            f"{key}: the checkpoint has {saved.get(key)}, this run has {self._identity.get(key)}"
            for key in sorted({*saved, *self._identity})
            if saved.get(key) != self._identity.get(key)
        ]
        if different:
            raise CheckpointError(
                f"resume: {folder} is of another run and cannot be continued ({'; '.join(different[:4])}). "
                "Give the settings it was made with, or another output_dir without resume."
            )

    def _drop_old(self, progress: Progress) -> None:
        saves = sorted(_saves(self.folder), key=_step_of)
        for folder in saves[: -self._config.keep]:
            if _step_of(folder) != progress.best_step:
                shutil.rmtree(folder)


def _trusted(folder: Path) -> Path:
    """`resume=PATH` may name a checkpoint or a run folder."""
    if not _NAME.search(folder.name):
        saves = sorted(_saves(folder / "checkpoints"), key=_step_of)
        if not saves:
            raise CheckpointError(f"resume={folder}: no checkpoint there. Give RUN/checkpoints/step-000100.")
        folder = saves[-1]
    fault = verify_checksums(folder)
    if fault is not None:
        raise CheckpointError(
            f"resume={folder}: the checkpoint is damaged ({fault}). Give the one before it, or resume=auto to find it."
        )
    return folder


def _saves(folder: Path) -> list[Path]:
    return [f for f in folder.iterdir() if f.is_dir() and _NAME.match(f.name)] if folder.is_dir() else []


def _step_of(folder: Path) -> int:
    match = _NAME.search(folder.name)
    assert match, folder
    return int(match.group(1))


def _save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    save_file({name: each.detach().cpu().contiguous() for name, each in tensors.items()}, file)


def _random_state() -> dict[str, Tensor]:
    """Of this process and its device."""
    on_device = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state(), **on_device}


def _by_rank(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{rank}.{device}": state for rank, each in enumerate(states) for device, state in each.items()}


def _set_random_state(states: Mapping[str, Tensor], rank: int) -> None:
    """A process that the saved run did not have keeps its seed."""
    if f"{rank}.cpu" in states:
        torch.set_rng_state(states[f"{rank}.cpu"])
    if f"{rank}.cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[f"{rank}.cuda"])
