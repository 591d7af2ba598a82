import contextlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
    tensors = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    sharded_checkpoint.load(tensors, folder, None)
    return tensors


def saved(folder: Path) -> Path:
    sharded_checkpoint.save(TENSORS, folder, None)
    return folder


def test_sharded_checkpoint_is_read_as_written(tmp_path: Path) -> None:
    folder = saved(tmp_path / "shards")
    assert not (folder / ".metadata").exists(), "a pickle"
    assert sharded_checkpoint.names_in(folder) == TENSORS.keys()
    for name, tensor in loaded(folder).items():
        assert torch.equal(tensor, TENSORS[name]), name


def test_pickled_metadata_is_not_read(tmp_path: Path) -> None:
    folder = saved(tmp_path / "shards")
    (folder / sharded_checkpoint.METADATA).unlink()
    (folder / ".metadata").write_bytes(pickle.dumps(Harmful(folder / "made")))
    for read in (sharded_checkpoint.names_in, loaded):
        with pytest.raises(CheckpointError, match="no valid metadata"):
            read(folder)
    assert not (folder / "made").exists()


def with_shard(content: dict[str, Any], at: int, value: Any) -> dict[str, Any]:
    content["weights/a"]["shards"][0][at] = value
    return content


@pytest.mark.parametrize(
    "change",
    [
        lambda content: with_shard(content, 2, "../up.distcp"),
        lambda content: with_shard(content, 2, "/tmp/x.distcp"),
        lambda content: with_shard(content, 2, "state.json"),
        lambda content: with_shard(content, 3, -8),
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
    folder = saved(tmp_path / "shards")
    file = folder / sharded_checkpoint.METADATA
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(CheckpointError, match="no valid metadata"):
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
    expected = contextlib.nullcontext() if is_whole else pytest.raises(CheckpointError, match="gaps or overlaps")
    with expected:
        assert sharded_checkpoint.names_in(tmp_path) == {"a"}


@pytest.mark.parametrize("content", [b"", b"no archive", pickle.dumps(Harmful(Path("made")))])
def test_hostile_shard_is_told(content: bytes, tmp_path: Path) -> None:
    folder = saved(tmp_path / "shards")
    (shard,) = folder.glob("*.distcp")
    shard.write_bytes(content + bytes(max(0, shard.stat().st_size - len(content))) if content else content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        loaded(folder)
    assert not Path("made").exists()
