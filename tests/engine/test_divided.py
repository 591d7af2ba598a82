"""Gradients at their owners: dealt evenly, sent once each in one order, whatever a process has to make again."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from app.engine.divided import Divided, dealt, notes
from app.engine.reduction import bytes_of
from app.errors import ConfigError


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


def _fails(_module: nn.Module, _gradient: object) -> None:
    raise torch.OutOfMemoryError


SIZES = [56, 42, 30, 20]  # from the last layer to the first


class _Done:
    def wait(self) -> None:
        """At once."""


@dataclass
class _Wire:
    """To processes that add nothing. What goes where is written down."""

    sent: list[tuple[int, int]] = field(default_factory=list)  # numbers, and to whom
    spread: list[int] = field(default_factory=list)  # by whom

    def reduce(self, tensor: Tensor, to: int) -> Any:
        self.sent.append((tensor.numel(), to))
        return _Done()

    def broadcast(self, _tensor: Tensor, of: int) -> Any:
        self.spread.append(of)
        return _Done()

    def total(self, tensor: Tensor) -> None:
        tensor.add_(9.0)  # another process's square


def divided(network: nn.Module, processes: int = 1, rank: int = 0) -> tuple[Divided, _Wire]:
    wire, parameters = _Wire(), list(network.parameters())
    made = Divided(parameters, dealt(parameters, processes), rank, wire)
    wire.spread.clear()  # all begin with the weights of the first
    return made, wire


def found(network: nn.Module) -> list[Tensor]:
    return [p.grad for p in network.parameters() if p.grad is not None]


def a_round(reduction: Divided, network: nn.Module, *seeds: int) -> None:
    for seed in seeds:
        if seed == seeds[-1]:
            reduction.expect_last()
        backward(network, seed)
    reduction.finish()


def test_each_round_is_sent_in_one_order_and_added_up() -> None:
    network = layers()
    reduction, wire = divided(network)
    batches: list[Any] = ["first", "second"]
    rounds: list[Any] = reduction.rounds(batches)
    assert rounds == [["first"], ["second"]]
    for step in (0, 1):
        wire.sent.clear()
        reduction.begin()
        a_round(reduction, network, 3 * step)
        assert [numbers for numbers, _ in wire.sent] == SIZES
        assert found(network) == [], "nothing is kept beside the sums"
        a_round(reduction, network, 3 * step + 1, 3 * step + 2)  # in two parts
        assert [numbers for numbers, _ in wire.sent] == 2 * SIZES
        sums = reduction.gradients()
        assert len(sums) == 4
        torch.testing.assert_close(found(network), expected(3 * step, 3 * step + 1, 3 * step + 2))


@pytest.mark.parametrize("layer", range(4))
def test_a_pass_that_failed_midway_counts_once(layer: int) -> None:
    network = layers()
    reduction, wire = divided(network)
    reduction.begin()
    a_round(reduction, network, 0)
    wire.sent.clear()
    reduction.expect_last()
    hook = network[layer].register_full_backward_pre_hook(_fails)
    with pytest.raises(torch.OutOfMemoryError):
        backward(network, 1)
    hook.remove()
    before = [numbers for numbers, _ in wire.sent]
    assert before == SIZES[: len(before)]
    assert (len(before) > 0) == (layer < 3), "some are on their way"
    reduction.begin_again()
    backward(network, 2)
    reduction.expect_last()
    backward(network, 1)
    assert [numbers for numbers, _ in wire.sent] == SIZES, "the others do not wait for the end of the pass"
    reduction.finish()
    assert [numbers for numbers, _ in wire.sent] == SIZES
    reduction.gradients()
    both, once = expected(0, 2, 1), expected(0, 1)
    for at, gradient in enumerate(found(network)):  # what had been sent is not made anew
        wanted = once[at] if len(network) - at <= len(before) else both[at]
        torch.testing.assert_close(gradient, wanted)


def test_what_got_no_gradient_is_sent_as_zeros() -> None:
    network = layers()
    unused = nn.Parameter(torch.ones(70))
    wire, parameters = _Wire(), [*network.parameters(), unused]
    reduction = Divided(parameters, dealt(parameters, 1), 0, wire)
    reduction.begin()
    reduction.expect_last()
    backward(network, 0)
    assert wire.sent == [], "the first bucket waits for it, and the others for the first"
    reduction.finish()
    reduction.gradients()
    assert unused.grad is not None
    assert not unused.grad.any()
    torch.testing.assert_close(found(network), expected(0))


def test_a_process_steps_its_own_and_gets_the_others_from_their_owners() -> None:
    owned = []
    for rank in (0, 1):
        network = layers()
        reduction, wire = divided(network, processes=2, rank=rank)
        reduction.begin()
        a_round(reduction, network, 0)
        sums = reduction.gradients()
        places = [at for at, p in enumerate(network.parameters()) if p.grad is not None]
        whole = expected(0)
        assert all(torch.equal(mine, whole[at]) for mine, at in zip(found(network), places, strict=True))
        assert len(sums) == len(reduction.stepped) == len(places)
        owned.append(places)
        owners = {at: to for at, (_, to) in zip(reversed(range(4)), wire.sent, strict=True)}
        assert places == [at for at, owner in sorted(owners.items()) if owner == rank]
        reduction.spread()
        assert wire.spread == [to for _, to in wire.sent]
        assert float(reduction.norm(torch.tensor(4.0))) == 5.0
        before = [each.clone() for each in sums]
        reduction.agree(sums)
        assert all(map(torch.equal, before, sums))
        sums[-1][0, 0] = float("inf")
        reduction.agree(sums)
        assert sums[0].isnan().all(), "whoever looks at any of them knows"
    assert sorted(owned[0] + owned[1]) == [0, 1, 2, 3]


@example(sizes=[1, 1, 1, 1, 1, 1, 1, 41], processes=6, narrow=False)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=8, max_size=60),
    processes=st.integers(1, 8),
    narrow=st.booleans(),
)
def test_shares_are_even_and_everything_has_one_owner(sizes: list[int], processes: int, narrow: bool) -> None:
    dtypes = (torch.float32, torch.bfloat16 if narrow else torch.float32)
    parameters = [
        nn.Parameter(torch.empty(size, dtype=dtypes[at % 2], device="meta")) for at, size in enumerate(sizes)
    ]
    buckets = dealt(parameters, processes)
    assert [id(p) for bucket, _ in buckets for p in bucket] == [id(p) for p in reversed(parameters)]
    assert buckets == dealt(parameters, processes)
    loads = [0] * processes
    for bucket, owner in buckets:
        loads[owner] += sum(map(bytes_of, bucket))
    assert min(loads) > 0
    largest = max(sum(map(bytes_of, bucket)) for bucket, _ in buckets)
    assert max(loads) <= sum(loads) / processes + largest


def test_what_cannot_be_divided_is_said() -> None:
    few = [nn.Parameter(torch.empty(4)) for _ in range(3)]
    with pytest.raises(ConfigError, match=r"to 4 processes, and there are 3 tensors. Set parallel=auto"):
        dealt(few, 4)
    assert notes("zero2", 1) == [
        "parallel=zero2 divides nothing among one process; launch.num_processes=auto takes all GPUs"
    ]
    assert notes("zero2", 2) == notes("auto", 1) == []


def test_whoever_keeps_no_weight_is_one_too_many() -> None:
    """Weights are kept by layers: there may be fewer of these than tensors."""
    parameters = list(layers().parameters())
    kept = {parameter: at % 2 for at, parameter in enumerate(parameters)}
    assert {owner for _, owner in dealt(parameters, 2, kept)} == {0, 1}
    with pytest.raises(ConfigError, match=r"launch.num_processes=2 or less"):
        dealt(parameters, 3, kept)
