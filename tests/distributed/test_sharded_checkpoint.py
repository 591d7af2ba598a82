import contextlib
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from app.distributed import sharded_checkpoint
from app.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TENSORS = {
    "weights/a": torch.arange(6, dtype=torch.float32).reshape(2, 3).mul_(0.1),
    "states/a/step": torch.tensor(3.0),
    "states/a/codes": torch.arange(5, dtype=torch.uint8),
    "weights/half": torch.full((4,), 1 / 3, dtype=torch.bfloat16),
}


class Harmful:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def loaded(folder: Path) -> dict[str, Tensor]:
    tensors = {name: torch.zeros_like(each) for name, each in TENSORS.items()}
    sharded_checkpoint.load(tensors, folder, None)
    return tensors


def old(folder: Path) -> Path:
    """As earlier versions wrote it."""
    state_dict_saver.save(dict(TENSORS), storage_writer=FileSystemWriter(folder))
    return folder


def new(folder: Path) -> Path:
    sharded_checkpoint.save(TENSORS, folder, None)
    return folder


@pytest.mark.parametrize("write", [old, new])
def test_sharded_checkpoint_is_read_as_written(write: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = write(tmp_path / "shards")
    assert (folder / ".metadata").exists() == (write is old)
    assert sharded_checkpoint.names_in(folder) == TENSORS.keys()
    for name, tensor in loaded(folder).items():
        assert torch.equal(tensor, TENSORS[name]), name


def edited(metadata: Metadata, **changes: Any) -> Metadata:
    """With other places of the shards."""
    places = {index: replace(place, **changes) for index, place in metadata.storage_data.items()}
    return replace(metadata, storage_data=places)


def as_bytes(metadata: Metadata, place: Path) -> Metadata:
    """The tensor as an entry of bytes, which DCP unpickles, in a file that runs code."""
    torch.save(Harmful(place / "made"), place / "__0_0.distcp")
    found = next(iter(metadata.storage_data.values()))
    whole = replace(found, relative_path="__0_0.distcp", offset=0, length=(place / "__0_0.distcp").stat().st_size)
    names: dict[str, Any] = dict.fromkeys(metadata.state_dict_metadata, BytesStorageMetadata())
    return replace(metadata, state_dict_metadata=names, storage_data={MetadataIndex(name): whole for name in names})


@pytest.mark.parametrize(
    ("hostile", "said"),
    [
        (lambda _metadata, place: Harmful(place / "made"), "posix.mkdir is none of the names"),
        (as_bytes, "BytesStorageMetadata is none of the names"),
        (lambda metadata, _: edited(metadata, relative_path="../../elsewhere.distcp"), "lies in ../../elsewhere"),
        (lambda metadata, place: edited(metadata, relative_path=f"{place}/x.distcp"), "lies in /"),
        (lambda metadata, _: edited(metadata, relative_path="state.json"), "lies in state.json"),
        (lambda metadata, _: edited(metadata, offset=-8), "are no sizes"),
        (lambda metadata, _: replace(metadata, storage_data={}), "weights/a"),
        (lambda _metadata, _place: [1], "state_dict_metadata"),
    ],
)
def test_hostile_pickle_of_a_sharded_checkpoint_runs_nothing(hostile: Any, said: str, tmp_path: Path) -> None:
    folder = old(tmp_path / "shards")
    metadata = FileSystemReader(folder).read_metadata()
    (folder / ".metadata").write_bytes(pickle.dumps(hostile(metadata, folder)))
    for read in (sharded_checkpoint.names_in, loaded):
        with pytest.raises(CheckpointError, match=said):
            read(folder)
    assert not (folder / "made").exists()


def with_shard(content: dict[str, Any], at: int, value: Any) -> dict[str, Any]:
    content["weights/a"]["shards"][0][at] = value
    return content


@pytest.mark.parametrize(
    "change",
    [
        lambda content: with_shard(content, 2, "../up.distcp"),
        lambda content: with_shard(content, 2, 3),
        lambda content: with_shard(content, 1, [2, -3]),
        lambda content: with_shard(content, 1, [1, 3]),
        lambda content: with_shard(content, 3, "0"),
        lambda content: with_shard(content, 0, [10**30, 0]),
        lambda content: content | {"weights/a": {"size": [2, 3]}},
        lambda content: content | {"weights/a": None},
        list,
    ],
)
def test_damaged_metadata_of_a_sharded_checkpoint_is_told(change: Any, tmp_path: Path) -> None:
    folder = new(tmp_path / "shards")
    file = folder / sharded_checkpoint.METADATA
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(CheckpointError, match="no metadata that this program reads"):
        loaded(folder)


@pytest.mark.parametrize(
    ("chunks", "is_whole"),
    [
        ([[0, 0], [2, 3]], True),
        ([[0, 0], [1, 3], [1, 0], [1, 3]], True),
        ([[1, 0], [1, 3], [0, 0], [1, 3], [2, 0], [0, 3]], True),
        ([[0, 0], [1, 3], [0, 0], [1, 3]], False),  # row 0 twice, row 1 never
        ([[0, 0], [2, 2], [0, 1], [2, 1]], False),  # column 1 twice, column 2 never
        ([[0, 0], [2, 1], [0, 1], [2, 2]], False),  # columns, which are never sharded
        ([[0, 0], [1, 3]], False),
        ([[0], [2]], False),
    ],
)
def test_metadata_of_shards_with_a_gap_or_overlap_is_refused(
    chunks: list[list[int]], is_whole: bool, tmp_path: Path
) -> None:
    shards = [[chunks[i], chunks[i + 1], "__0_0.distcp", 0, 8] for i in range(0, len(chunks), 2)]
    (tmp_path / sharded_checkpoint.METADATA).write_text(json.dumps({"a": {"size": [2, 3], "shards": shards}}))
    expected = contextlib.nullcontext() if is_whole else pytest.raises(CheckpointError, match="exactly once")
    with expected:
        assert sharded_checkpoint.names_in(tmp_path) == {"a"}


@pytest.mark.parametrize("content", [b"", b"no archive", pickle.dumps(Harmful(Path("made")))])
def test_hostile_shard_is_told(content: bytes, tmp_path: Path) -> None:
    folder = new(tmp_path / "shards")
    (shard,) = folder.glob("*.distcp")
    shard.write_bytes(content + bytes(max(0, shard.stat().st_size - len(content))) if content else content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        loaded(folder)
    assert not Path("made").exists()
