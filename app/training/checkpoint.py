"""Checkpoints: save a run for a bit-identical resume, and find the newest intact one.

A checkpoint of an unsharded model is two safetensors files, of a sharded one a DCP folder. Both can be read by any
number of processes, except 8-bit optimizer states, whose blocks cannot be resharded.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from app.base.weight_files import without_optimizer
from app.config.finished_run import how_to_resume
from app.config.kinds import METRICS
from app.config.schema import CheckpointConfig
from app.config.validate import number, parse_section
from app.distributed import sharded_checkpoint
from app.distributed import sharded_checkpoint as sharded
from app.distributed.fsdp import is_sharded, like_shard, local, own_rows, shard_of
from app.distributed.launch import MAX_DEPTH, read_depth
from app.distributed.process_group import HostGroup
from app.errors import AppError, CheckpointError
from app.files import (
    CHECKPOINT_NAME,
    DISK_ERRORS,
    RESUMED,
    SAVE_NUMBER,
    STATE,
    checkpoints_in,
    checksummed_folder,
    delete_folder,
    next_save_number,
    read_json,
    read_object,
    remove_temp_dirs,
    report_write_errors,
    temp_dir_of,
    verify_checksums,
    write_json,
)
from app.optim.optimizer_state import flatten, load_state, named_states, saved_names
from app.optim.optimizers import STEPS_ROUNDED
from app.training.identity import differences
from app.training.train_step import Stepper

WEIGHTS, OPTIMIZER, SHARDS = "weights.safetensors", "optimizer.safetensors", "shards"
_PER_PROCESS_MARK = "@"


def named_tensors(stepper: Stepper) -> dict[str, Tensor]:
    """Return the tensors to save, as `weights/NAME` and `states/NAME/KEY`."""
    trained = stepper.model.trained()
    named: dict[str, Tensor] = {f"weights/{name}": parameter.detach() for name, parameter in trained.items()}
    for name, states in _states(stepper).items():
        tensors = ((key, value) for key, value in states.items() if isinstance(value, Tensor))
        for key, value in tensors:
            suffix, tensor = _portable(value, trained[name])
            named[f"states/{name}/{key}{suffix}"] = tensor
    return named


def _portable(value: Tensor, parameter: nn.Parameter) -> tuple[str, Tensor]:
    """Return name suffix and tensor: sharded like its parameter if the shapes agree, else only of this rank."""
    if not is_sharded(parameter) or is_sharded(value) or value.ndim == 0:
        return "", value
    if value.shape == local(parameter).shape:
        return "", like_shard(value, parameter)
    return f"{_PER_PROCESS_MARK}{shard_of(parameter)}", value


def plain_states(stepper: Stepper) -> dict[str, Any]:
    """Return optimizer states that are plain numbers, and the count of steps with stochastic rounding."""
    numbers = {
        f"{name}/{key}": value
        for name, states in _states(stepper).items()
        for key, value in states.items()
        if isinstance(value, int | float)
    }
    group = stepper.optimizer.param_groups[0]
    return numbers | ({STEPS_ROUNDED: group[STEPS_ROUNDED]} if STEPS_ROUNDED in group else {})


def load_sharded(folder: Path, plain: Mapping[str, Any], stepper: Stepper, host_group: HostGroup) -> None:
    """Load if the checkpoint, this run or both are sharded."""
    if not stepper.optimizer.state:
        stepper.allocate_states()
    tensors = named_tensors(stepper)
    shards = folder / SHARDS
    if shards.is_dir():
        _require_names(folder, tensors, sharded_checkpoint.names_in(shards), host_group)
        sharded_checkpoint.load(tensors, shards, host_group.group)
        numbers = dict(plain)
    else:
        names = {place: without_optimizer(name) for place, name in saved_names(plain).items()}
        numbers = _renamed(plain, names)
        _load_rows(folder, names, tensors, host_group)
    for name, states in _states(stepper).items():
        states |= {key: numbers[f"{name}/{key}"] for key in states if f"{name}/{key}" in numbers}
    if STEPS_ROUNDED in numbers:
        stepper.optimizer.param_groups[0][STEPS_ROUNDED] = numbers[STEPS_ROUNDED]


def load_weights(folder: Path, trained: Mapping[str, nn.Parameter], host_group: HostGroup) -> None:
    """Load the trained weights of a checkpoint into the parameters of the same names."""
    tensors: dict[str, Tensor] = {f"weights/{name}": parameter.detach() for name, parameter in trained.items()}
    shards = folder / SHARDS
    if shards.is_dir():
        sharded_checkpoint.load(tensors, shards, host_group.group)
        return
    with safe_open(folder / WEIGHTS, framework="pt") as saved, torch.no_grad():
        names = set(saved.keys())
        if names != trained.keys():
            odd = sorted(names ^ trained.keys())[:3]
            raise CheckpointError(f"{folder} has other weights than this run trains (e.g. {', '.join(odd)}).")
        for name, parameter in trained.items():
            _copy_rows(saved, name, parameter.detach())


def _states(stepper: Stepper) -> dict[str, dict[str, Any]]:
    """Return the optimizer states by the names of trained weights."""
    return {without_optimizer(name): states for name, states in named_states(stepper.optimizer).items()}


def _require_names(folder: Path, tensors: Mapping[str, Tensor], have: set[str], host_group: HostGroup) -> None:
    """Raise for missing tensors on all ranks together: each checks its own shards."""
    missing = sorted({name for names in host_group.all_gather_object(sorted(tensors.keys() - have)) for name in names})
    if not missing:
        return
    saved_by = {name.rpartition(".")[2] for name in have if _PER_PROCESS_MARK in name} or {"1"}
    if any(_PER_PROCESS_MARK in name for name in (*missing, *have)):
        raise CheckpointError(
            f"resume: {folder} has 8-bit optimizer states, which cannot be resharded. Resume with the number of "
            f"processes that saved it ({', '.join(saved_by)}) and the same parallel=, or start again in another "
            "output_dir with optimizer=adamw, whose states can be resumed with any number of processes."
        )
    raise CheckpointError(f"{folder} has other weights than this run trains (e.g. {missing[0]}).")


def _load_rows(folder: Path, names: Mapping[str, str], tensors: Mapping[str, Tensor], host_group: HostGroup) -> None:
    """Read the rows of this rank from files of full tensors."""
    with (
        safe_open(folder / WEIGHTS, framework="pt") as weights,
        safe_open(folder / OPTIMIZER, framework="pt") as states,
    ):
        places = {f"weights/{name}": (weights, name) for name in weights.keys()}  # noqa: SIM118  not a dictionary
        for path in states.keys():  # noqa: SIM118
            place, key = _split_path(path)
            places[f"states/{names.get(place, place)}/{key}"] = (states, path)
        _require_names(folder, tensors, set(places), host_group)
        for name, tensor in tensors.items():
            _copy_rows(*places[name], tensor)


def _split_path(path: str) -> tuple[str, str]:
    """Split into `state/3` and the last part: bitsandbytes has a dictionary between them."""
    parts = path.split("/")
    return "/".join(parts[:2]), parts[-1]


@torch.no_grad()
def _copy_rows(saved: Any, name: str, tensor: Tensor) -> None:
    shard = local(tensor)
    if tensor.ndim == 0:
        shard.copy_(saved.get_tensor(name))
    elif shard.numel():
        rows = saved.get_slice(name)
        if tuple(rows.get_shape()) != tuple(tensor.shape):
            raise CheckpointError(
                f"resume: {name} has shape {rows.get_shape()} in the checkpoint, but not in this run."
            )
        shard.copy_(rows[own_rows(tensor)])


def _renamed(plain: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Rename the numbers of a flat state from parameter indices to parameter names."""
    split = [(*_split_path(path), value) for path, value in plain.items()]
    renamed = {f"{names[place]}/{key}": value for place, key, value in split if place in names}
    rounded = {key: value for _, key, value in split if key == STEPS_ROUNDED}
    return renamed | rounded


# ---- checkpoint


_RANDOM, DEPTH = "random.safetensors", "depth.json"
_READ = ("*.safetensors", STATE, *(f"{SHARDS}/{pattern}" for pattern in sharded.READ))
_STATE_TYPES = {"identity": dict, "choices": dict, "progress": dict, "scaler": dict | None, "optimizer": dict}


@dataclass(slots=True)
class Progress:
    """Counts and results since the first step of the run, over all starts."""

    step: int = number(0, at_least=0)  # optimizer steps done; also the cursor of the loader
    tokens: int = number(0, at_least=0)
    trained_tokens: int = number(0, at_least=0)
    skipped_steps: int = number(0, at_least=0)
    skipped_in_a_row: int = number(0, at_least=0)
    best_loss: float | None = None  # of the objective, negated if higher is better
    best_step: int = number(0, at_least=0)
    evals_without_gain: int = number(0, at_least=0)
    first_loss: float | None = None
    last_loss: float | None = None
    last_eval_loss: float | None = None
    start_metrics: dict[str, Any] = field(default_factory=dict)  # of the evaluation before the first step
    metrics: dict[str, Any] = field(default_factory=dict)  # numbers of the last evaluation
    best_metrics: dict[str, Any] = field(default_factory=dict)
    # how often micro-batches are halved after OOM
    depth: int = number(0, at_least=0, at_most=MAX_DEPTH)

    def note_eval(self, metrics: Mapping[str, float], min_delta: float, objective: str = "eval_loss") -> bool:
        """Record an evaluation; return whether it is the best so far. A non-finite value is never the best."""
        self.metrics, cost = dict(metrics), METRICS[objective].cost(metrics[objective])
        self.last_eval_loss = metrics["eval_loss"]
        improved = math.isfinite(cost) and (self.best_loss is None or cost < self.best_loss - min_delta)
        if improved:
            self.best_loss, self.best_step, self.evals_without_gain = cost, self.step, 0
            self.best_metrics = self.metrics
        else:
            self.evals_without_gain += 1
        return improved


def find_checkpoint(folder: Path, resume: str | None, *, tidy: bool = True) -> tuple[Path | None, list[str]]:
    """Find the checkpoint to resume, with a remark for each damaged one; `tidy` removes unfinished ones."""
    if resume is None:
        return None, []
    if tidy:
        remove_temp_dirs(folder)
    if resume != "auto":
        return _intact(Path(resume).expanduser()), []
    remarks: list[str] = []
    for save in reversed(checkpoints_in(folder)):
        fault = damage_of(save)
        if fault is None:
            return save, remarks
        remarks.append(f"{save} is damaged ({fault}); using the previous one")
    if remarks:
        raise CheckpointError(
            f"resume=auto: every checkpoint in {folder} is damaged. "
            "Start again with another output_dir, or move the folder away. " + "; ".join(remarks)
        )
    elsewhere = [Path(place) for place in read_object(folder / RESUMED) if Path(place).is_absolute()]
    if not elsewhere:
        return None, []
    save = elsewhere[0]
    if not save.is_dir():
        raise CheckpointError(
            f"resume=auto: {folder} has no checkpoint yet, and {save}, which it resumes from, does not exist. Restore "
            "it, or start again with another output_dir."
        )
    return _intact(save), [f"no checkpoint here yet: resuming from {save}, as in the previous start"]


def choices_of(save: Path | None) -> dict[str, str]:
    """Return the values of `auto` when the run first started: a resumed run keeps them."""
    if save is None:
        return {}
    if SAVE_NUMBER not in read_json(save / STATE):
        raise CheckpointError(
            f"{save} was saved before version 0.1.0 and cannot be resumed. Train again in another output_dir."
        )
    return dict(_read_state(save)["choices"])


class Checkpoints:
    """Checkpoints of one run, which can only be resumed with the same `identity`."""

    def __init__(
        self, folder: Path, config: CheckpointConfig, identity: Mapping[str, Any], choices: Mapping[str, str]
    ) -> None:
        self.folder = folder
        self._config = config
        self._identity = dict(identity)
        self._choices = dict(choices)
        self._is_intact: dict[Path, bool] = {}  # checkpoints written or read in this start: whether they are intact

    def keep_choices(self, choices: Mapping[str, str]) -> None:
        """Store other choices from now on."""
        self._choices = dict(choices)

    def save(self, progress: Progress, stepper: Stepper, host_group: HostGroup) -> list[str]:
        """Write a checkpoint atomically and delete old ones; return remarks on those that cannot be deleted. Rank 0
        writes; for a sharded model each process writes its shards.
        """
        on_device = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
        random = host_group.all_gather_object({"cpu": torch.get_rng_state(), **on_device})
        plains = host_group.all_gather_object(plain_states(stepper))
        target = self._place(progress.step)
        sharding = stepper.model.sharding
        if host_group.rank > 0:
            if sharding is not None:
                host_group.wait_for_all()  # until the folder exists
                with report_write_errors(target, DISK_ERRORS):
                    sharded.save(named_tensors(stepper), temp_dir_of(target) / SHARDS, host_group.group)
            return []
        state = {
            SAVE_NUMBER: next_save_number(self.folder),
            "identity": self._identity,
            "choices": self._choices,
            "progress": asdict(progress),
            "scaler": None if stepper.scale is None else stepper.scale.state_dict(),
        }
        with checksummed_folder(target) as temporary:
            if sharding is not None:
                host_group.wait_for_all()
                sharded.save(named_tensors(stepper), temporary / SHARDS, host_group.group)
                state |= {"optimizer": {key: value for states in plains for key, value in states.items()}}
            else:
                tensors, plain = flatten(stepper.optimizer.state_dict())
                _save_tensors(stepper.model.trained(), temporary / WEIGHTS)
                _save_tensors(tensors, temporary / OPTIMIZER)
                state |= {"optimizer": plain}
            by_rank = {
                f"{rank}.{name}": tensor for rank, states in enumerate(random) for name, tensor in states.items()
            }
            save_file(by_rank, temporary / _RANDOM)
            (temporary / STATE).write_text(json.dumps(state))
        self._is_intact[target] = True
        old = [folder for folder in self._old() if folder != self._place(progress.best_step)]
        return [remark for folder in old if (remark := delete_folder(folder))]

    def load(self, folder: Path, stepper: Stepper, host_group: HostGroup) -> Progress:
        """Restore the state of checkpoint `folder`, saved by any number of processes."""
        state = _read_state(folder)
        self._require_same_run(folder, state)
        # facts unknown in this start, such as the hash of a deleted start adapter, stay in later checkpoints
        self._identity = {**state["identity"], **self._identity}
        self._is_intact[folder] = True
        if stepper.model.sharding is None and not (folder / SHARDS).is_dir():
            load_weights(folder, stepper.model.trained(), host_group)
            load_state(stepper.optimizer, load_file(folder / OPTIMIZER), state["optimizer"])
        else:
            load_sharded(folder, state["optimizer"], stepper, host_group)
        if stepper.scale is not None:
            stepper.scale.load_state_dict(state["scaler"])
        random, rank = load_file(folder / _RANDOM), host_group.rank
        if f"{rank}.cpu" in random:  # a new rank keeps its seed
            torch.set_rng_state(random[f"{rank}.cpu"])
        if f"{rank}.cuda" in random and torch.cuda.is_available():
            torch.cuda.set_rng_state(random[f"{rank}.cuda"])
        return parse_section(Progress, state["progress"])

    def note_resumed(self, save: Path) -> None:
        """Record the checkpoint of `resume=PATH` as the last saved, for a start that ends before its first save."""
        save, is_here = save.resolve(), save.resolve().parent == self.folder.resolve()
        self.folder.mkdir(exist_ok=True)
        # the next save has the same place and a later step
        write_json(self.folder / RESUMED, {save.name if is_here else str(save): next_save_number(self.folder)})

    def note_depth(self, depth: int) -> None:
        """Store a deeper split for the next start: this one cannot repeat its micro-batch."""
        self.folder.mkdir(exist_ok=True)
        temporary = temp_dir_of(self.folder / f"{os.getpid()}-{DEPTH}")  # several processes may write at once
        temporary.write_text(json.dumps(depth))
        temporary.rename(self.folder / DEPTH)

    def noted_depth(self) -> int:
        return read_depth(self.folder / DEPTH)

    def best(self, progress: Progress) -> Path | None:
        """Return the checkpoint of the best evaluation, if it still exists and is intact."""
        folder = self._place(progress.best_step)
        return folder if folder.is_dir() and damage_of(folder) is None else None

    def _place(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def _require_same_run(self, folder: Path, state: Mapping[str, Any]) -> None:
        different = differences(state["identity"], self._identity)
        if different:
            raise CheckpointError(
                f"resume: {folder} belongs to a run with different settings ({'; '.join(different[:4])}). "
                "Use its settings, or another output_dir without resume."
                f"{how_to_resume(folder.parent.parent)}"
            )

    def _old(self) -> list[Path]:
        """Return the checkpoints saved before the last `keep` intact ones."""
        saves, intact = checkpoints_in(self.folder), 0
        while len(saves) > self._config.keep - intact > 0:
            save = saves.pop()
            if save not in self._is_intact:
                self._is_intact[save] = damage_of(save) is None
            intact += self._is_intact[save]
        return saves if intact == self._config.keep else []


def _intact(folder: Path) -> Path:
    """Return the intact checkpoint of `resume=PATH`, a checkpoint or a run folder."""
    if not CHECKPOINT_NAME.match(folder.name):
        saves = checkpoints_in(folder / "checkpoints")
        if not saves:
            raise CheckpointError(f"resume={folder}: no checkpoint found. Set resume=RUN/checkpoints/step-000100.")
        folder = saves[-1]
    fault = damage_of(folder)
    if fault is not None:
        raise CheckpointError(
            f"resume={folder}: the checkpoint is damaged ({fault}). Use the previous one, or resume=auto to find it."
        )
    return folder


def damage_of(save: Path) -> str | None:
    """Return the damage of a checkpoint; None if checksums match and its files can be read."""
    fault = verify_checksums(save, _READ)
    if fault is not None:
        return fault
    try:
        is_whole = _has_valid_values(_read_state(save))
    except (OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError, AppError):
        is_whole = False
    if not is_whole:
        return f"{STATE} is invalid"
    for name in (_RANDOM,) if (save / SHARDS).is_dir() else (WEIGHTS, OPTIMIZER, _RANDOM):
        try:
            with safe_open(save / name, framework="pt"):
                pass
        except (OSError, SafetensorError):
            return f"{name} has no tensors"
    return None


def _has_valid_values(state: Mapping[str, Any]) -> bool:
    """Return whether all values have the types and ranges of a run."""
    if not all(isinstance(state[key], kind) for key, kind in _STATE_TYPES.items()):
        return False
    saved_names(state["optimizer"])  # can be read
    progress, steps = parse_section(Progress, state["progress"]), state["identity"].get("steps", "any")
    evaluations = (progress.start_metrics, progress.metrics, progress.best_metrics)
    measured = [value for metrics in evaluations for value in metrics.values()]
    chosen = [state["choices"][key] for key in ("precision", "attention")]
    is_within = steps == "any" or progress.step <= steps
    return is_within and all(isinstance(n, int | float) for n in measured) and all(isinstance(c, str) for c in chosen)


def progress_of(save: Path) -> Progress:
    """Return the counts and results of a run at a checkpoint."""
    return parse_section(Progress, _read_state(save)["progress"])


def _read_state(save: Path) -> dict[str, Any]:
    state: dict[str, Any] = read_json(save / STATE)
    return {key: state[key] for key in _STATE_TYPES}


def _save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)
