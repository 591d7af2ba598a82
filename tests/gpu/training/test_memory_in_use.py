"""Memory and clocks of a GPU, by nvidia-ml-py or, without it, by torch."""

import subprocess
import sys

import pytest
import torch

from app.training import memory


@pytest.mark.alone
def test_a_real_driver_sees_what_another_process_takes() -> None:
    """Its process may be invisible in a container; its memory is not. torch counts a gigabyte as our own."""

    words = "import torch; kept = torch.zeros(1 << 30, device='cuda'); print('there', flush=True); input()"
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    before = memory.taken_by_driver(uuid) or memory.taken_by_cuda(0)
    with subprocess.Popen(
        [sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "there\n"
        during = memory.taken_by_driver(uuid) or memory.taken_by_cuda(0)
        other.communicate("\n")
    assert during.total == before.total
    assert 3.2e9 < during.bytes - before.bytes < 7e9


@pytest.mark.alone
def test_a_real_device_tells_its_memory_and_clocks() -> None:
    held = torch.zeros(1 << 28, device="cuda")
    used = memory.device_used_bytes()
    assert used is not None
    assert held.nbytes <= torch.cuda.memory_reserved() < used < torch.cuda.get_device_properties(0).total_memory
    clocks = memory.clocks()
    if clocks is None:
        pytest.importorskip("pynvml")
    assert clocks
    assert all(value > 0 for value in clocks.values())
