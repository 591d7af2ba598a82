"""Saving a run so that it continues bit for bit, and finding the save that can be trusted."""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from app.config.schema import CheckpointConfig
from app.engine.files import (
    aside_of,
    damage,
    remove_leftovers,
    told_where_the_disk_is_full,
    whole_folder,
)
from app.engine.peers import Peers
from app.engine.progress import Progress
from app.engine.step import Stepper
from app.errors import CheckpointError
from app.optim.parts import load_parts
from app.optim.state import flatten, load_state

_WEIGHTS, _OPTIMIZER = "weights", "optimizer"  # of each process that has some of its own
_RANDOM, _STATE, _DEPTH = "random.safetensors", "state.json", "depth.json"
_States = tuple[Sequence[Mapping[str, Tensor]], Mapping[str, Tensor], Sequence[dict[str, Any]]]
_NAME = re.compile(r"step-(\d{6,})$")


def find_checkpoint(folder: Path, resume: str | None, *, tidy: bool = True) -> tuple[Path | None, list[str]]:
    """The save to continue from, with a remark about each one that was passed over; `tidy`: clear up first."""
    if resume is None:
        return None, []
    if tidy:
        remove_leftovers(folder)
    if resume != "auto":
        return _trusted(Path(resume)), []
    remarks: list[str] = []
    for save in sorted(_saves(folder), key=_step_of, reverse=True):
        fault = damage(save)
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

    def save(self, progress: Progress, stepper: Stepper, peers: Peers) -> None:
        """Write one, whole or not at all, and drop those that are no longer kept. The first process does, for all; but
        where each has states of its own, each writes these.
        """
        random = peers.collected(_random_state())
        if peers.rank > 0 and not stepper.divides:
            return
        target = self.folder / f"step-{progress.step:06d}"
        tensors, plain = flatten(stepper.optimizer.state_dict())
        plains = peers.collected(plain) if stepper.divides else [plain]
        if peers.rank == 0:
            self._write(target, progress, stepper, (random, tensors, plains), peers)
            return
        peers.wait_for_all()  # the folder is there
        with told_where_the_disk_is_full(target):
            _save_tensors(tensors, aside_of(target) / _file_of(_OPTIMIZER, peers.rank))
            if own := stepper.kept():
                _save_tensors(own, aside_of(target) / _file_of(_WEIGHTS, peers.rank))
        peers.wait_for_all()

    def _write(
        self, target: Path, progress: Progress, stepper: Stepper, states: _States, peers: Peers
    ) -> None:
        random, tensors, plains = states
        state = {
            "identity": self._identity,
            "choices": self._choices,
            "progress": progress.as_dict(),
            "optimizer": plains[0],
            "optimizers": plains[1:],  # of the other processes, where each has its own
            "scaler": None if stepper.scaler is None else stepper.scaler.state_dict(),
        }
        with whole_folder(target) as aside:
            if stepper.divides:
                peers.wait_for_all()  # they write beside what follows
            _save_tensors(stepper.kept(), aside / _file_of(_WEIGHTS, 0))
            _save_tensors(tensors, aside / _file_of(_OPTIMIZER, 0))
            save_file(_by_rank(random), aside / _RANDOM)
            (aside / _STATE).write_text(json.dumps(state))
            if stepper.divides:
                peers.wait_for_all()
        self._drop_old(progress)

    def load(self, folder: Path, stepper: Stepper, peers: Peers) -> Progress:
        """Put everything back as it was after the step of `folder`."""
        state = json.loads((folder / _STATE).read_text())
        self._require_same_run(folder, state["identity"])
        load_weights(folder, stepper.trainee.trained())
        plains = [state["optimizer"], *state.get("optimizers", ())]
        if stepper.divides or len(plains) > 1:
            files = [folder / _file_of(_OPTIMIZER, rank) for rank in range(len(plains))]
            load_parts(stepper.optimizer, files, plains)
        else:
            load_state(stepper.optimizer, load_file(folder / _file_of(_OPTIMIZER, 0)), plains[0])
        if stepper.scaler is not None:
            stepper.scaler.load_state_dict(state["scaler"])
        _set_random_state(load_file(folder / _RANDOM), peers.rank)
        return Progress(**state["progress"])

    def note_depth(self, depth: int) -> None:
        """For the next start, from whichever save: what this one cannot do again, and so finds out too late."""
        self.folder.mkdir(exist_ok=True)
        aside = aside_of(self.folder / f"{os.getpid()}-{_DEPTH}")  # several may find it out at once
        aside.write_text(json.dumps(depth))
        aside.rename(self.folder / _DEPTH)

    def noted_depth(self) -> int:
        """0 where nothing was noted."""
        file = self.folder / _DEPTH
        return int(json.loads(file.read_text())) if file.is_file() else 0

    def best(self, progress: Progress) -> Path | None:
        """The save of the best evaluation, if it is still there and whole."""
        folder = self.folder / f"step-{progress.best_step:06d}"
        return folder if folder.is_dir() and damage(folder) is None else None

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


def load_weights(folder: Path, weights: Mapping[str, nn.Parameter]) -> None:
    """The trained weights of a save into the parameters of the same names, those that are away excepted."""
    files = sorted(folder.glob(f"{_WEIGHTS}*.safetensors"))
    with ExitStack() as opened, torch.no_grad():
        saved = [opened.enter_context(safe_open(file, framework="pt")) for file in files]
        file_of = {name: each for each in saved for name in each.keys()}  # noqa: SIM118  no dictionary
        if file_of.keys() != weights.keys():
            odd = sorted(file_of.keys() ^ weights.keys())[:3]
            raise CheckpointError(
                f"{folder} has other weights than this run trains (for instance {', '.join(odd)})."
            )
        for name, parameter in weights.items():
            if parameter.untyped_storage().nbytes():
                parameter.copy_(file_of[name].get_tensor(name))


def _trusted(folder: Path) -> Path:
    """`resume=PATH` may name a checkpoint or a run folder."""
    if not _NAME.search(folder.name):
        saves = sorted(_saves(folder / "checkpoints"), key=_step_of)
        if not saves:
            raise CheckpointError(f"resume={folder}: no checkpoint there. Give RUN/checkpoints/step-000100.")
        folder = saves[-1]
    fault = damage(folder)
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


def _file_of(stem: str, rank: int) -> str:
    return f"{stem}.safetensors" if rank == 0 else f"{stem}-{rank}.safetensors"


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
