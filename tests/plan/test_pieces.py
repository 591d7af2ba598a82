"""What a plan leaves out of rounding by chance: pieces like others, and no byte."""

import pytest
import torch
from torch import nn

from app.engine.counting import Event, StorageCounter
from app.optim import rounding
from app.plan.allocator import Allocator, footprint

PIECE = 1 << 18  # numbers: a mebibyte of random ones, so that large and small requests mix


def events(numbers: int, *, left_out: bool) -> list[Event]:
    """Of two weights in turn, as the counter sees them; real ones."""
    weight = nn.Parameter(torch.empty(numbers, dtype=torch.bfloat16))
    exact = torch.zeros(numbers)
    counter = StorageCounter("cpu")
    counter.ignore([weight, exact])
    with counter:
        for _ in range(2):
            chance = rounding.chance_of(weight.device, 0, 0, 0)
            if left_out:
                with rounding.rounded(rounding.Pieces.UNLIKE):
                    rounding.round_into(weight, exact, chance)
            else:
                rounding.round_into(weight, exact, chance)
    return counter.events


def peak(found: list[Event]) -> int:
    alive = most = 0
    for _, size in found:
        alive += size
        most = max(most, alive)
    return most


def places(found: list[Event], *, grow: bool) -> list[tuple[bool, int, int]]:
    """Where requests afterwards would lie."""
    allocator = Allocator(grow=grow)
    for which, size in found:
        allocator.allocate(which, size) if size > 0 else allocator.free(which)
    sizes = [PIECE * 4, 700, PIECE // 2, PIECE * 8, PIECE]
    for at, size in enumerate(sizes):
        allocator.allocate(-1 - at, size)
    return [allocator.place(-1 - at) for at in range(len(sizes))]


@pytest.mark.parametrize("pieces", [0.3, 1, 1.5, 2, 2.5, 3, 3.7, 4, 4.2, 5, 6, 6.9, 9, 10, 11.5])
def test_memory_comes_and_goes_as_with_all_of_them(pieces: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "_PIECE", PIECE)
    all_of_them, some = (events(round(pieces * PIECE), left_out=each) for each in (False, True))
    assert len(some) < len(all_of_them) if pieces > 4 else some == all_of_them
    assert peak(some) == peak(all_of_them)
    for grow in (True, False):
        assert footprint(some, grow=grow) == footprint(all_of_them, grow=grow)
        assert places(some, grow=grow) == places(all_of_them, grow=grow)


def test_a_real_step_leaves_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "_PIECE", 4)
    exact = torch.arange(37.0)
    weight = torch.zeros(37, dtype=torch.bfloat16)
    with rounding.rounded(rounding.Pieces.UNLIKE):
        rounding.round_into(weight, exact, rounding.chance_of(weight.device, 0, 0, 0))
    assert not torch.equal(weight.float(), exact)
    rounding.round_into(weight, exact, rounding.chance_of(weight.device, 0, 0, 0))
    assert torch.equal(weight.float(), exact)


def test_none_leaves_a_weight_as_it_was() -> None:
    weight, exact = torch.ones(8, dtype=torch.bfloat16), torch.full((8,), 3.0)
    chance = torch.Generator().manual_seed(1)
    with rounding.rounded(rounding.Pieces.NONE):
        rounding.round_into(weight, exact, chance)
    assert weight.eq(1).all()
    rounding.round_into(weight, exact, chance)
    assert weight.eq(3).all()
