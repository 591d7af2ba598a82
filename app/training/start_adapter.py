"""The numbers that an adapter began with, where the base gave them up (PiSSA, OLoRA, CorDA): kept with the run.

At its end the adapter is saved as the difference from them, which is one of the ordinary base.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.config.adapters import ADAPTER_WEIGHTS, changes_base
from app.distributed.environment import world
from app.distributed.fsdp import whole_tensors
from app.errors import CheckpointError
from app.files import checksummed_folder, verify_checksums
from app.model.save import saved_tensors
from app.model.training_model import TrainingModel
from app.training.resolve import ResolvedRun


def drawn_start(resolved: ResolvedRun, model: TrainingModel) -> dict[str, Tensor]:
    """Copies of the halves as they were drawn, by their names in files; call it before a checkpoint is loaded."""
    if not changes_base(resolved.config.adapter):
        return {}
    named = {name: each.detach() for name, each in saved_tensors(model).items() if ".lora_" in name}
    found = named.items() if model.sharding is None else whole_tensors(named)
    return {name.replace(".default.", "."): each.to("cpu", copy=True) for name, each in found if world().is_first}


def keep_start(drawn: dict[str, Tensor], resolved: ResolvedRun, folder: Path) -> None:
    """Write the start of a new run; that of a continued one must be what was drawn again, or its base is another."""
    if not drawn:
        return
    if not resolved.checkpoint:
        with checksummed_folder(folder) as target:
            save_file(drawn, target / ADAPTER_WEIGHTS)
        return
    known = read_start(folder)
    if known.keys() != drawn.keys() or not all(torch.equal(known[name], each) for name, each in drawn.items()):
        raise CheckpointError(
            f"adapter.init={resolved.config.adapter.init}: what is computed from the base here differs from {folder}, "
            "so the base would be another. Continue on the machine and with the packages of the first start, or begin "
            "again in another output_dir."
        )


def read_start(folder: Path) -> dict[str, Tensor]:
    """The start that a run keeps; refused where it is damaged or lost."""
    problem = verify_checksums(folder, (ADAPTER_WEIGHTS,)) if folder.is_dir() else "it is not there"
    if problem:
        raise CheckpointError(
            f"{folder}: the numbers that the adapter began with cannot be used ({problem}). Bring the folder back, or "
            "start a new run."
        )
    return load_file(folder / ADAPTER_WEIGHTS)
