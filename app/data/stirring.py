"""New neighbours for rows: those of two bins change places where both bins still hold them.

A plan puts the same lengths together each time. Where few rows are of equal length these would be the same rows, epoch
after epoch.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_WORK = 2_000_000  # rows looked at in all: of a million rows enough are equal
_ROUNDS = 64

Indices = NDArray[np.int64]


def stirred(
    order: Indices,
    starts: Indices,
    lengths: NDArray[Any],
    capacity: int,
    most_room: Indices,
    random: np.random.Generator,
) -> Indices:
    """`order` with rows of some bins exchanged; `lengths` are those of its rows.

    Each bin keeps its number of rows. What it has left is never below zero, nor above its `most_room`.
    """
    order, lengths = order.copy(), lengths.astype(np.int64)
    bins = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(order)))
    room = capacity - np.add.reduceat(lengths, starts)
    for _ in range(min(_ROUNDS, _WORK // len(order))):
        here, there = _exchanges(lengths, bins, room, most_room, random)
        order[here], order[there] = order[there], order[here]
        longer = lengths[there] - lengths[here]
        lengths[here] += longer
        lengths[there] -= longer
        room[bins[here]] -= longer
        room[bins[there]] += longer
    return order


def _exchanges(
    lengths: Indices, bins: Indices, room: Indices, most_room: Indices, random: np.random.Generator
) -> tuple[Indices, Indices]:
    """Places that may change their rows; a bin is in one exchange at most, so that all can be made at once."""
    here, there = random.permutation(_alike(lengths, 2 * float(room.mean()) + 1, random)).T
    longer = lengths[there] - lengths[here]
    left_here, left_there = room[bins[here]] - longer, room[bins[there]] + longer
    fits = (bins[here] != bins[there]) & (left_here >= 0) & (left_there >= 0)
    fits &= (left_here <= most_room[bins[here]]) & (left_there <= most_room[bins[there]])
    here, there = here[fits], there[fits]
    number = np.arange(len(here))
    first = np.full(len(room), len(here))
    np.minimum.at(first, bins[here], number)
    np.minimum.at(first, bins[there], number)
    alone = (first[bins[here]] == number) & (first[bins[there]] == number)
    return here[alone], there[alone]


def _alike(lengths: Indices, spread: float, random: np.random.Generator) -> Indices:
    """Pairs of places whose rows differ by about `spread` tokens at most: what bins can take."""
    near = np.argsort(lengths + random.random(len(lengths)) * spread)
    return near[: len(near) // 2 * 2].reshape(-1, 2)
