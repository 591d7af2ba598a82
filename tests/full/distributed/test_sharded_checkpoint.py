"""Sharded checkpoints of one to three processes, equal to the bit."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from app.distributed import sharded_checkpoint
from app.distributed.process_group import Runtime
from tests.harness.processes import ProcessesByCount

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ROWS = (1, 2, 5, 8)  # fewer than processes, uneven, even


def tensors_of(runtime: Runtime, *, filled: bool) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (runtime.processes,))
    torch.manual_seed(3)
    whole = {f"weights/{rows}": torch.randn(rows, 3) for rows in ROWS}
    found: dict[str, Tensor] = {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in whole.items()}
    found |= {"states/step": torch.tensor(7.0), f"states/codes@{runtime.rank}": torch.arange(4) + runtime.rank}
    return found if filled else {name: torch.zeros_like(each) for name, each in found.items()}


def differing(runtime: Runtime, folder: Path) -> list[str]:
    """Names of tensors that are not read as they were written."""
    saved, read = (tensors_of(runtime, filled=filled) for filled in (True, False))
    sharded_checkpoint.save(saved, folder, runtime.host_group.group)
    sharded_checkpoint.load(read, folder, runtime.host_group.group)
    return [name for name in saved if not torch.equal(local(read[name]), local(saved[name]))]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize("count", [2, 3])
def test_sharded_checkpoint_of_several_processes_is_equal_to_the_bit(
    processes: ProcessesByCount, tmp_path: Path, count: int
) -> None:
    assert processes(count).run(differing, tmp_path) == [[]] * count
    alone = torch.zeros(5, 3)
    sharded_checkpoint.load({"weights/5": alone}, tmp_path, None)
    torch.manual_seed(3)
    assert torch.equal(alone, [torch.randn(rows, 3) for rows in ROWS][2])
