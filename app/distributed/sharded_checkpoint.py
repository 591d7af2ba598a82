"""Sharded checkpoints by torch's distributed checkpoint (DCP): each process writes and reads its own shards.

The location of each shard, in DCP a pickle, is a JSON file here. The shards are archives of torch, which DCP reads with
`weights_only`.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from app.errors import CheckpointError
from app.files import os_error_of, read_json

METADATA, _SHARD = "metadata.json", ".distcp"
_DAMAGES = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
_REMEDY = "Use another checkpoint, or a copy of the run"
READ = (METADATA, f"*{_SHARD}")  # patterns of the files that are read


class _Writer(FileSystemWriter):
    def write_data(self, *arguments: Any, **named: Any) -> Any:
        try:
            return super().write_data(*arguments, **named)
        except RuntimeError as fault:  # processes send each other only the outermost error
            error = os_error_of(fault)
            if error is None:
                raise
            raise error from fault

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        (Path(self.path) / METADATA).write_text(json.dumps(_described(metadata.state_dict_metadata, places)))


class _Reader(FileSystemReader):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = _read_metadata(folder)  # DCP would continue after an error

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._metadata


def _read_metadata(folder: Path) -> Metadata:
    try:
        return _metadata(read_json(folder / METADATA))
    except _DAMAGES as fault:
        raise CheckpointError(f"{folder} has no valid metadata ({fault}). {_REMEDY}.") from fault


def _described(tensors: Mapping[str, Any], places: Mapping[Any, Any]) -> dict[str, Any]:
    """Return shape and shards of each tensor: first index, shape, file, and byte range."""
    by_chunk = {(index.fqn, tuple(index.offset)): place for index, place in places.items()}
    return {
        name: {
            "size": list(tensor.size),
            "shards": [
                [list(chunk.offsets), list(chunk.sizes), place.relative_path, place.offset, place.length]
                for chunk in tensor.chunks
                for place in (by_chunk[name, tuple(chunk.offsets)],)
            ],
        }
        for name, tensor in tensors.items()
    }


def _metadata(tensors: Mapping[str, Any]) -> Metadata:
    """Return the DCP metadata of these tensors; raise ValueError unless all are numbers in files of this folder."""
    saved: dict[str, Any] = {}
    places = {}
    for name, tensor in tensors.items():
        chunks, whole = [], _size(tensor["size"])
        for offsets, sizes, file, *extent in tensor["shards"]:
            if PurePath(file).name != file or not file.endswith(_SHARD) or len(extent) != 2:
                raise ValueError(f"{name} is in {file}")
            chunks.append(ChunkStorageMetadata(_size(offsets), _size(sizes)))
            places[MetadataIndex(name, _size(offsets))] = _StorageInfo(file, *_size(extent))
        if not _is_whole(chunks, whole):
            raise ValueError(f"the shards of {name} have gaps or overlaps")
        saved[name] = TensorStorageMetadata(TensorProperties(), whole, chunks)
    return Metadata(saved, storage_data=places)


def _is_whole(chunks: Sequence[ChunkStorageMetadata], whole: torch.Size) -> bool:
    """Return whether the chunks are row ranges that cover a tensor without gap or overlap."""
    if any(len(chunk.offsets) != len(whole) or len(chunk.sizes) != len(whole) for chunk in chunks):
        return False
    if not whole:
        return len(chunks) == 1
    spans = sorted((chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]) for chunk in chunks if chunk.sizes[0])
    ends = [0, *(end for _, end in spans)]
    has_whole_rows = all(not any(chunk.offsets[1:]) and chunk.sizes[1:] == whole[1:] for chunk in chunks)
    return has_whole_rows and ends == [*(first for first, _ in spans), whole[0]]


def _size(numbers: Any) -> torch.Size:
    if not isinstance(numbers, list) or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{numbers} are not sizes")
    return torch.Size(numbers)


def save(tensors: Mapping[str, Tensor], folder: Path, group: Any) -> None:
    """Write by all processes of `group` together; a tensor that several have under one name is written once.

    A system error, such as a full disk, is raised unchanged.
    """
    try:
        state_dict_saver.save(dict(tensors), storage_writer=_Writer(folder), process_group=group)
    except CheckpointException as fault:
        cause = next((error for error, _ in fault.failures.values() if isinstance(error, OSError)), None)
        raise (cause or fault) from fault


def load(tensors: Mapping[str, Tensor], folder: Path, group: Any) -> None:
    """Fill the tensors in place, with any sharding. `group`: None for one process."""
    reader = _Reader(folder)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")
            state_dict_loader.load(dict(tensors), storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as fault:
        cause = next((error for error, _ in fault.failures.values()), fault)
        raise CheckpointError(f"{folder} cannot be read ({type(cause).__name__}: {cause}). {_REMEDY}.") from fault


def names_in(folder: Path) -> set[str]:
    """Return the names of all tensors of a checkpoint."""
    return set(_read_metadata(folder).state_dict_metadata)
