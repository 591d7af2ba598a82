"""Buckets of gradients: sent once each, in one order, whatever a process has to make again."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from app.engine.reduction import Together


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    """Of this process alone; what many sum is asked in tests/command/test_processes.py."""
    meeting = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what was sent, in its order."""
    sizes: list[int] = []
    real = torch.distributed.all_reduce

    def all_reduce(tensor: Tensor, **given: bool) -> object:
        sizes.append(tensor.numel())
        return real(tensor, **given)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return sizes


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4 + i, 5 + i, bias=False) for i in range(4)))


def backward(network: nn.Module, seed: int) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    network(x).square().sum().backward()


def expected(*seeds: int) -> list[Tensor]:
    plain = layers()
    for seed in seeds:
        backward(plain, seed)
    return [p.grad for p in plain.parameters() if p.grad is not None]


def together(network: nn.Module, bucket_bytes: int = 250) -> Together:
    return Together(list(network.parameters()), bucket_bytes)


SIZES = [56, 42, 30 + 20]  # from the last layer to the first; two of them share a bucket


def test_buckets_are_sent_in_their_order_by_the_last_pass(sent: list[int]) -> None:
    network = layers()
    reduction = together(network)
    for step in (0, 1):
        reduction.begin()
        backward(network, 2 * step)
        assert sent == step * SIZES, "not the last one"
        reduction.expect_last()
        backward(network, 2 * step + 1)
        assert sent == (step + 1) * SIZES
        reduction.finish()
        found = [p.grad for p in network.parameters() if p.grad is not None]
        assert all(map(torch.equal, found, expected(2 * step, 2 * step + 1)))


@pytest.mark.parametrize("layer", range(4))
def test_a_pass_that_failed_midway_counts_once(layer: int, sent: list[int]) -> None:
    network = layers()
    reduction = together(network)
    reduction.begin()
    backward(network, 0)
    reduction.expect_last()
    hook = network[layer].register_full_backward_pre_hook(_fails)
    with pytest.raises(torch.OutOfMemoryError):
        backward(network, 1)
    hook.remove()
    assert sent == SIZES[: 3 - layer] if layer else sent == SIZES[:2], "some are on their way"
    reduction.begin_again()
    backward(network, 0)
    reduction.expect_last()
    backward(network, 1)
    reduction.finish()
    found = [p.grad for p in network.parameters() if p.grad is not None]
    assert sent == SIZES
    assert all(map(torch.equal, found, expected(0, 1)))


def _fails(_module: nn.Module, _gradient: object) -> None:
    raise torch.OutOfMemoryError


def test_what_got_no_gradient_is_sent_as_zeros(sent: list[int]) -> None:
    network = layers()
    unused = nn.Parameter(torch.ones(7))
    reduction = Together([*network.parameters(), unused], 260)
    reduction.begin()
    reduction.expect_last()
    backward(network, 0)
    assert sent == [], "the first bucket waits for it, and the others for the first"
    reduction.finish()
    assert len(sent) == 3
    assert unused.grad is not None
    assert not unused.grad.any()
    found = [p.grad for p in network.parameters() if p.grad is not None]
    assert all(map(torch.equal, found, expected(0)))


def test_no_two_dtypes_share_a_bucket(sent: list[int]) -> None:
    parameters = [
        nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.float32, torch.bfloat16, torch.float32)
    ]
    reduction = Together(parameters)
    reduction.begin()
    reduction.finish()
    assert sent == [3, 3, 3]
