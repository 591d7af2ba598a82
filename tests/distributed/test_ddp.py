"""Gradients of several processes: sums over all of them, the same in every start, whatever a process has to repeat."""

import multiprocessing
from pathlib import Path

import torch
from torch import Tensor, nn

from app.distributed.ddp import GradientSum

PROCESSES = 3
SMALL_BUCKETS_MB = 0.0001
STEPS, MICRO_BATCHES = 3, 2


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4 + i, 5 + i, bias=False) for i in range(4)))


def backward(network: nn.Module, step: int, rank: int, micro_batch: int) -> None:
    seed = 100 * step + 10 * rank + micro_batch
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    network(x).square().sum().backward()


def expected(step: int) -> list[Tensor]:
    plain = layers().double()
    for rank in range(PROCESSES):
        for micro_batch in range(MICRO_BATCHES):
            x = torch.randn(
                3, 4, generator=torch.Generator().manual_seed(100 * step + 10 * rank + micro_batch)
            )
            plain(x.double()).square().sum().backward()
    return [p.grad for p in plain.parameters() if p.grad is not None]


def summed(rank: int, folder: Path, fails_in: int | None) -> None:
    """Rank 1 fails midway in a backward pass of the step `fails_in`, and makes its micro-batches again."""
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    network, unused = layers(), nn.Parameter(torch.ones(7))
    parameters = [*network.parameters(), unused]
    gradients = GradientSum(parameters, SMALL_BUCKETS_MB)
    found = []
    for step in range(STEPS):
        gradients.clear()
        if step == fails_in and rank == 1:
            backward(network, step, rank, 0)
            hook = network[1].register_full_backward_pre_hook(_out_of_memory)
            try:
                backward(network, step, rank, 1)
            except torch.OutOfMemoryError:
                gradients.clear()
            hook.remove()
        for micro_batch in range(MICRO_BATCHES):
            backward(network, step, rank, micro_batch)
        gradients.reduce()
        assert unused.grad is not None
        assert not unused.grad.any()
        found.append([p.grad.clone() for p in network.parameters() if p.grad is not None])
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def _out_of_memory(_module: nn.Module, _gradient: object) -> None:
    raise torch.OutOfMemoryError


def of_all(folder: Path, fails_in: int | None = None) -> list[list[list[Tensor]]]:
    folder.mkdir()
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=summed, args=(rank, folder, fails_in)) for rank in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    return [torch.load(folder / f"{rank}.pt") for rank in range(PROCESSES)]


def test_gradients_are_the_sums_of_all_processes_in_every_step(tmp_path: Path) -> None:
    first, *others = of_all(tmp_path / "undisturbed")
    for step, found in enumerate(first):
        for one, exact in zip(found, expected(step), strict=True):
            torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-5)
    for other in others:
        assert all(
            torch.equal(a, b)
            for mine, its in zip(first, other, strict=True)
            for a, b in zip(mine, its, strict=True)
        )


def test_a_process_that_ran_out_of_memory_repeats_its_passes_alone(tmp_path: Path) -> None:
    undisturbed, disturbed = (
        of_all(tmp_path / "undisturbed")[0],
        of_all(tmp_path / "disturbed", fails_in=1)[0],
    )
    for mine, its in zip(undisturbed, disturbed, strict=True):
        assert all(map(torch.equal, mine, its))
