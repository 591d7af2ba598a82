"""Gradients of several processes: sums over all of them, the same in every start, whatever a process has to repeat."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from app.distributed.gradient_reduction import AllReduce
from tests.conftest import REPO

PROCESSES = 3
SMALL_BUCKETS_MB = 0.0001
STEPS, MICRO_BATCHES = 3, 2


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4 + i, 5 + i, bias=False) for i in range(4)))


def rows(step: int, rank: int, micro_batch: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + 10 * rank + micro_batch))


def backward(network: nn.Module, x: Tensor) -> None:
    network(x).square().sum().backward()


def expected(step: int) -> list[Tensor]:
    plain = layers().double()
    for rank in range(PROCESSES):
        for micro_batch in range(MICRO_BATCHES):
            backward(plain, rows(step, rank, micro_batch).double())
    return [p.grad for p in plain.parameters() if p.grad is not None]


def summed(rank: int, fails_in: int | None) -> list[list[Tensor]]:
    """Of each step. Rank 1 fails midway in a backward pass of the step `fails_in`, and repeats its micro-batches."""
    network, unused = layers(), nn.Parameter(torch.ones(7))
    gradients = AllReduce([*network.parameters(), unused], SMALL_BUCKETS_MB)
    found = []
    for step in range(STEPS):
        gradients.begin()
        if step == fails_in and rank == 1:
            backward(network, rows(step, rank, 0))
            hook = network[1].register_full_backward_pre_hook(_out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                backward(network, rows(step, rank, 1))
            hook.remove()
            gradients.begin()
        for micro_batch in range(MICRO_BATCHES):
            backward(network, rows(step, rank, micro_batch))
        gradients.finish()
        assert unused.grad is not None
        assert not unused.grad.any()
        found.append([p.grad.clone() for p in network.parameters() if p.grad is not None])
    return found


def _out_of_memory(_module: nn.Module, _gradient: object) -> None:
    raise torch.OutOfMemoryError


def main(rank: int, folder: Path) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    torch.save([summed(rank, None), summed(rank, 1)], folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_gradients_are_sums_and_a_process_repeats_its_passes_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.distributed.test_gradient_reduction"]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], cwd=REPO, stderr=subprocess.DEVNULL)
        for rank in range(PROCESSES)
    ]
    assert [process.wait(120) for process in processes] == [0] * PROCESSES
    first, *others = (torch.load(tmp_path / f"{rank}.pt") for rank in range(PROCESSES))
    undisturbed, disturbed = first
    for step in range(STEPS):
        for found, again, exact in zip(undisturbed[step], disturbed[step], expected(step), strict=True):
            torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
            assert torch.equal(again, found)
        for other, _ in others:
            assert all(map(torch.equal, other[step], undisturbed[step]))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
