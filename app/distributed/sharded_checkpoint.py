"""Sharded checkpoints by torch's distributed checkpoint (DCP): each process writes and reads its own shards.

`.metadata` is a pickle, so only folders whose hashes were compared may be read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from app.files import os_error_of


class _Writer(FileSystemWriter):
    def write_data(self, *arguments: Any, **named: Any) -> Any:
        try:
            return super().write_data(*arguments, **named)
        except RuntimeError as fault:  # processes send each other the outermost error alone
            error = os_error_of(fault)
            if error is None:
                raise
            raise error from fault


def save(tensors: Mapping[str, Tensor], folder: Path, group: Any) -> None:
    """Write, by all processes of `group` together; a tensor that several have under one name is written once.

    An error of the system, such as a full disk, is raised as it was in the process that met it.
    """
    try:
        state_dict_saver.save(dict(tensors), storage_writer=_Writer(folder), process_group=group)
    except CheckpointException as fault:
        cause = next((each for each, _ in fault.failures.values() if isinstance(each, OSError)), None)
        raise (cause or fault) from fault


def load(tensors: Mapping[str, Tensor], folder: Path, group: Any) -> None:
    """Fill the tensors in place, however they are sharded. `group`: None for one process by itself."""
    reader = FileSystemReader(folder)
    state_dict_loader.load(dict(tensors), storage_reader=reader, process_group=group, no_dist=group is None)


def names_in(folder: Path) -> set[str]:
    """Names of all tensors of a checkpoint."""
    return set(FileSystemReader(folder).read_metadata().state_dict_metadata)
