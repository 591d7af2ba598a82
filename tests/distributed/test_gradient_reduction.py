"""Gradients of several processes: sums over all of them, the same in every start, whatever a process has to repeat."""

import pytest
import torch
from torch import Tensor, nn

from app.distributed.gradient_reduction import AllReduce
from app.distributed.process_group import Runtime
from tests.harness.processes import ProcessesByCount

PROCESSES = 3
SMALL_BUCKETS_MB = 0.0001
STEPS, MICRO_BATCHES = 3, 2


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4 + i, 5 + i, bias=False) for i in range(4)))


def rows(step: int, rank: int, micro_batch: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + 10 * rank + micro_batch))


def loss(network: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = network(x).square().sum()
    return found


def expected(step: int) -> list[Tensor]:
    plain = layers().double()
    for rank in range(PROCESSES):
        for micro_batch in range(MICRO_BATCHES):
            loss(plain, rows(step, rank, micro_batch).double()).backward()
    return [p.grad for p in plain.parameters() if p.grad is not None]


def accumulate(network: nn.Module, reduction: AllReduce, step: int, rank: int) -> None:
    for micro_batch in range(MICRO_BATCHES):
        found = loss(network, rows(step, rank, micro_batch))
        if micro_batch == MICRO_BATCHES - 1:
            found = reduction.last_loss(found)
        found.backward()
    reduction.finish()


def copies(network: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in network.parameters() if p.grad is not None]


def gradients_of_steps(runtime: Runtime, overlap: bool, failing_step: int | None) -> list[list[Tensor]]:
    """Rank 1 fails midway in a backward pass of `failing_step`, and repeats its micro-batches."""
    network, unused = layers(), nn.Parameter(torch.ones(7))
    reduction = AllReduce([*network.parameters(), unused], overlap=overlap, bucket_mb=SMALL_BUCKETS_MB)
    found = []
    for step in range(STEPS):
        reduction.begin()
        if step == failing_step and runtime.rank == 1:
            loss(network, rows(step, 1, 0)).backward()
            hook = network[1].register_full_backward_pre_hook(run_out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                loss(network, rows(step, 1, 1)).backward()
            hook.remove()
            reduction.begin()
        accumulate(network, reduction, step, runtime.rank)
        assert unused.grad is not None
        assert not unused.grad.any()
        found.append(copies(network))
    return found


def run_out_of_memory(_module: nn.Module, _gradient: object) -> None:
    raise torch.OutOfMemoryError


def test_all_reduce_gives_sums_and_one_process_repeats_its_passes(processes: ProcessesByCount) -> None:
    several = processes(PROCESSES)
    undisturbed, *others = several.run(gradients_of_steps, False, None)
    for step in range(STEPS):
        for found, exact in zip(undisturbed[step], expected(step), strict=True):
            torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    disturbed = several.run(gradients_of_steps, False, 1)
    overlapping = several.run(gradients_of_steps, True, None)
    for other in (*others, *disturbed, *overlapping):
        for step in range(STEPS):
            assert all(map(torch.equal, other[step], undisturbed[step]))


def first_equals_second(runtime: Runtime) -> bool:
    """Whether the gradient of a batch is the same as the first one of a start and as a later one."""
    network = layers()
    reduction = AllReduce(list(network.parameters()), bucket_mb=SMALL_BUCKETS_MB)
    found = []
    for _ in range(2):
        reduction.begin()
        accumulate(network, reduction, 0, runtime.rank)
        found.append(copies(network))
    return all(map(torch.equal, *found))


def test_all_reduce_sums_in_one_order_from_the_first_step(processes: ProcessesByCount) -> None:
    """DDP by itself rebuilds its buckets after the first."""
    assert processes(PROCESSES).run(first_equals_second) == [True] * PROCESSES
