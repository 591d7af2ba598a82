"""Which rows share a bin: best fit, longest first, over all rows at once; in later epochs with new neighbours.

Rows of equal length are interchangeable, and so are bins that hold the same lengths. So the plan is made over lengths
and groups of bins, of which there are thousands, not over rows, of which there may be millions; only at the end are
rows dealt to bins. The result is that of placing row by row.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_STIRRED = 2_000_000  # rows looked at in all: of a million rows enough are equal
_ROUNDS = 64

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Content:
    """What a bin holds: all of `below`, and on top of it `each` rows of `length`."""

    below: "_Content | None"
    length: int
    each: int


def plan_bins(lengths: NDArray[Any], capacity: int) -> tuple[Indices, Indices]:
    """`(order, starts)`: bin i holds the rows `order[starts[i]:starts[i + 1]]`, the last one the rest.

    Deterministic. Every row is in exactly one bin, and no bin has more than `capacity` tokens.
    """
    if not len(lengths):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    assert lengths.min() >= 1, "a row has at least one token"
    assert lengths.max() <= capacity, "a row is no longer than a bin"
    counts = np.bincount(lengths)
    return _deal(_fill(counts, capacity), lengths, counts)


def least_bins(lengths: NDArray[Any], capacity: int) -> int:
    """No plan needs fewer bins than this: all tokens over the capacity, and the bound L2 of Martello and Toth.

    L2 takes the rows of at least `small` tokens. Those of more than half a bin need one each, and those of more
    than `capacity - small` share it with none. The others fill what the rest leave, at best to the brim.
    """
    if not len(lengths):
        return 0
    counts = np.bincount(lengths, minlength=capacity + 1)
    rows = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])  # [n]: rows shorter than n
    tokens = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts * np.arange(capacity + 1))])
    half = capacity // 2
    small = np.arange(half + 1)
    big = rows[-1] - rows[half + 1]
    shared = rows[capacity - small + 1] - rows[half + 1]
    room = shared * capacity - (tokens[capacity - small + 1] - tokens[half + 1])
    beyond = tokens[half + 1] - tokens[small] - room
    return int((big + np.maximum(0, -(-beyond // capacity))).max())


def beyond_least(bins: int, least: int) -> str:
    """For people: how far a plan is from `least_bins`."""
    more = bins - least
    return f"{more:,} more than the provable least of {least:,}" if more else "provably the fewest"


class _Shelves:
    """Groups of equal bins, by the room left in them."""

    def __init__(self, capacity: int) -> None:
        self._groups: list[list[tuple[_Content, int]]] = [[] for _ in range(capacity + 1)]
        self._occupied = 0  # bit r: there is a group with room r. The tightest fit is then a matter of bits

    def put(self, content: _Content, room: int, bins: int) -> None:
        if bins:
            self._groups[room].append((content, bins))
            self._occupied |= 1 << room

    def take_tightest(self, length: int) -> tuple[_Content, int, int] | None:
        """A group with the least room that `length` fits into."""
        fitting = self._occupied >> length
        if not fitting:
            return None
        room = length + (fitting & -fitting).bit_length() - 1
        content, bins = self._groups[room].pop()
        if not self._groups[room]:
            self._occupied &= ~(1 << room)
        return content, room, bins

    def all(self) -> list[tuple[_Content, int]]:
        return [group for groups in self._groups for group in groups]


def _fill(counts: NDArray[np.int64], capacity: int) -> list[tuple[_Content, int]]:
    """Best-fit-decreasing over a histogram of lengths."""
    shelves = _Shelves(capacity)
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            content, room, bins = shelves.take_tightest(length) or (None, capacity, left)
            # after one such row a bin is the tightest again while it fits: it is filled at once
            each = room // length
            full = min(bins, left // each)
            shelves.put(_Content(content, length, each), room - each * length, full)
            left -= full * each
            if left and full < bins:
                shelves.put(_Content(content, length, left), room - left * length, 1)
                left, full = 0, full + 1
            if content is not None:
                shelves.put(content, room, bins - full)
    return shelves.all()


def _deal(
    groups: list[tuple[_Content, int]], lengths: NDArray[Any], counts: NDArray[np.int64]
) -> tuple[Indices, Indices]:
    """Rows to bins, shortest index first among equal lengths."""
    small = (
        lengths.astype(np.uint16) if len(counts) <= 1 << 16 else lengths
    )  # sorted by radix, not by comparison
    by_length = np.argsort(small, kind="stable")
    next_row = (np.cumsum(counts) - counts).tolist()
    parts, sizes, bins_of = [], [], []
    for content, bins in groups:
        size, part = 0, []
        layer: _Content | None = content
        while layer is not None:
            start = next_row[layer.length]
            end = next_row[layer.length] = start + bins * layer.each
            part.append(by_length[start:end].reshape(bins, layer.each))
            size, layer = size + layer.each, layer.below
        parts.append((part[0] if len(part) == 1 else np.concatenate(part, axis=1)).ravel())
        sizes.append(size)
        bins_of.append(bins)
    ends = np.cumsum(np.repeat(sizes, bins_of))
    return np.concatenate(parts), np.concatenate([[0], ends[:-1]])


def shuffle_bins(
    order: Indices,
    starts: Indices,
    lengths: NDArray[Any],
    capacity: int,
    most_room: Indices,
    random: np.random.Generator,
) -> Indices:
    """`order` with rows of some bins exchanged, as a plan puts the same lengths together each time; where few rows are
    of equal length these would be the same rows, epoch after epoch. `lengths` are those of the rows in `order`.

    Each bin keeps its number of rows. What it has left is never below zero, nor above its `most_room`.
    """
    order, lengths = order.copy(), lengths.astype(np.int64)
    bins = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(order)))
    room = capacity - np.add.reduceat(lengths, starts)
    for _ in range(min(_ROUNDS, _STIRRED // len(order))):
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
