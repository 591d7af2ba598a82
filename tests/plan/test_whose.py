"""What a further layer adds, where it can be worked out by hand."""

import pytest
import torch
from torch import nn

from app.plan.flops import FlopCounter
from app.plan.replay import Replay, Seen
from app.plan.stages import BOTTOM, EVALUATION, FORWARD
from app.plan.whose import AGAIN, NOBODY, PLAIN, LayerCounter, Turn

WEIGHT, INPUT, PART, OUTPUT, NORM, OF_ANOTHER = range(1, 7)
KINDS = {WEIGHT: "trained_weights"}
OWNERS = {WEIGHT: AGAIN, INPUT: AGAIN, PART: AGAIN, NORM: AGAIN}


def counter() -> LayerCounter:
    flops = FlopCounter()
    return LayerCounter("cpu", {}, flops, flops=flops)


def turn(event: int, sort: int, *, of_update: bool = False) -> Turn:
    return Turn(event, 0, sort, of_update)


def more(events: list[tuple[int, int]], turns: list[Turn], stage: str = EVALUATION) -> dict[str, int]:
    found = Replay(Seen(events, [(1, stage)], KINDS, OWNERS, turns)).phases()[stage]
    return {kind: size for kind, size in found.more(AGAIN).items() if size}


BEGUN = [(WEIGHT, 100), (INPUT, 10)]


def test_what_lives_in_the_turn_of_the_layer_is_nothing_that_more_layers_add() -> None:
    """All layers need as much, each in its turn: the first of them to do so may be the one in the middle."""
    events = [
        *BEGUN,
        (PART, 50),
        (OUTPUT, 10),
        (PART, -50),
        (INPUT, -10),
        (OF_ANOTHER, 50),
        (OF_ANOTHER, -50),
    ]
    assert more(events, [turn(2, AGAIN), turn(5, NOBODY)]) == {"trained_weights": 100}


def test_what_it_leaves_behind_is() -> None:
    events = [*BEGUN, (PART, 50), (OUTPUT, 10), (OF_ANOTHER, 20), (OF_ANOTHER, -20)]
    assert more(events, [turn(2, AGAIN), turn(4, NOBODY)], FORWARD) == {
        "trained_weights": 100,
        "saved_activations": 60,
    }


def test_where_a_later_layer_needs_less_too() -> None:
    """Most is alive in its turn, and what it keeps then is kept by others as well."""
    events = [*BEGUN, (PART, 50), (OF_ANOTHER, 500), (OF_ANOTHER, -500), (OUTPUT, 10)]
    assert more(events, [turn(2, AGAIN), turn(5, NOBODY)], FORWARD) == {
        "trained_weights": 100,
        "saved_activations": 60,
    }


def test_what_it_left_in_an_earlier_turn_is() -> None:
    first = [*BEGUN, (NORM, 5), (INPUT, -10)]
    second = [(OUTPUT, 10), (PART, 50), (PART, -50), (OF_ANOTHER, 1)]
    turns = [turn(2, AGAIN), turn(3, NOBODY), turn(5, AGAIN), turn(7, NOBODY)]
    assert more([*first, *second], turns, BOTTOM) == {"trained_weights": 100, "temporary": 5}
    in_update = [*turns[:2], turn(5, AGAIN, of_update=True), turn(7, NOBODY, of_update=True)]
    assert more([*first, *second], in_update, BOTTOM) == {"trained_weights": 100, "temporary": 5}


def test_a_layer_owns_what_is_made_in_its_turn_unless_it_is_given_away() -> None:
    seen = counter()
    with seen:
        before = torch.ones(8)
        seen.turn(PLAIN)
        own, given = torch.ones(8), torch.ones(8)
        seen.turn(NOBODY)
        seen.give(NOBODY, [given])
        seen.give(AGAIN, [before])
        after = torch.ones(8)
        owners = seen.owners()
        named = {name: owners.get(seen.serial_of(tensor) or 0, NOBODY) for name, tensor in vars_of(locals())}
    assert named == {"before": AGAIN, "own": PLAIN, "given": NOBODY, "after": NOBODY}


def vars_of(found: dict[str, object]) -> list[tuple[str, torch.Tensor]]:
    return [(name, value) for name, value in found.items() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("several", [False, True])
def test_what_is_made_of_its_gradients_is_its_own(several: bool) -> None:
    mine, other = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    whole = torch.ones(32)
    mine.grad, other.grad = whole[:16].view(4, 4), whole[16:].view(4, 4)  # parts of a bucket
    seen = counter()
    with seen:
        seen.follow({AGAIN: [mine]})
        if several:
            of_mine, of_other = torch._foreach_norm([mine.grad, other.grad])
        else:
            of_mine, of_other = mine.grad @ mine.grad, other.grad + 1
        sum_of_all = torch.stack([of_mine, of_other])
        next_of_mine = of_mine * 2
        seen.stop_following()
        later = mine.grad + 1
    owners = seen.owners()
    found = [
        owners.get(seen.serial_of(each) or 0, NOBODY)
        for each in (of_mine, of_other, sum_of_all, next_of_mine, later)
    ]
    assert found == [AGAIN, NOBODY, NOBODY, AGAIN, NOBODY]
    assert all(each.of_update for each in seen.turns)


def test_flops_are_told_apart_by_turn() -> None:
    flops = FlopCounter()
    seen = LayerCounter("cpu", {}, flops, flops=flops)
    with seen:
        square = torch.ones(8, 8)
        square @ square
        seen.turn(PLAIN)
        square @ square
        square @ square
    assert {turn: counted.passes for turn, counted in flops.counted().items()} == {NOBODY: 1024, PLAIN: 2048}


def test_a_repeated_span_has_the_same_turns_and_owners() -> None:
    first = counter()
    with first:
        kept = [torch.ones(4)]
        mark = first.mark()
        first.turn(AGAIN)
        kept.append(torch.ones(8))
        first.turn(NOBODY)
        first.give(PLAIN, [torch.ones(16)])
        span = first.since(mark)
    second = counter()
    with second:
        kept.append(torch.ones(64))
        kept.append(torch.ones(64))
        second.repeat(span, {1: kept[1]})
    assert [(each.event, each.serial, each.sort) for each in second.turns] == [(2, 2, AGAIN), (3, 3, NOBODY)]
    assert second.owners() == {3: AGAIN, 4: PLAIN}
    assert first.owners() == {2: AGAIN, 3: PLAIN}
