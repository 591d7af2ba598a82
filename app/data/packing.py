"""Packing of rows into bins: best-fit-decreasing over all rows, reshuffled in later epochs.

Rows of equal length are interchangeable, and so are bins with the same lengths. So the plan works on lengths and
groups of bins (thousands) instead of rows (up to millions); rows are assigned to bins at the end. The result is the
same as row by row.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAX_SHUFFLED_ROWS = 2_000_000  # over all rounds; with millions of rows, enough have equal lengths
_MAX_ROUNDS = 64

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Content:
    """Content of a bin: `below`, plus `count` rows of `length`."""

    below: "_Content | None"
    length: int
    count: int


def plan_bins(lengths: NDArray[Any], capacity: int) -> tuple[Indices, Indices]:
    """Return `(order, starts)`: bin i has the rows `order[starts[i]:starts[i + 1]]`, the last bin up to the end.

    Deterministic. Every row is in exactly one bin, and no bin has more than `capacity` tokens.
    """
    if not len(lengths):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    assert lengths.min() >= 1, "a row has at least one token"
    assert lengths.max() <= capacity, "a row is no longer than a bin"
    counts = np.bincount(lengths)
    return _assign(_fill(counts, capacity), lengths, counts)


def min_bins(lengths: NDArray[Any], capacity: int) -> int:
    """Return a lower bound for the number of bins: tokens over capacity, and the bound L2 of Martello and Toth.

    L2 takes the rows with at least `small` tokens. Rows longer than half a bin need one bin each, and rows longer than
    `capacity - small` share it with no other. At best, the other rows fill the remaining space completely.
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
    free = shared * capacity - (tokens[capacity - small + 1] - tokens[half + 1])
    beyond = tokens[half + 1] - tokens[small] - free
    return int((big + np.maximum(0, -(-beyond // capacity))).max())


class _OpenBins:
    """Groups of equal bins by free tokens."""

    def __init__(self, capacity: int) -> None:
        self._groups: list[list[tuple[_Content, int]]] = [[] for _ in range(capacity + 1)]
        # bit n: a group with n free tokens exists; the tightest fit is the lowest bit
        self._occupied = 0

    def put(self, content: _Content, free: int, bins: int) -> None:
        if bins:
            self._groups[free].append((content, bins))
            self._occupied |= 1 << free

    def take_tightest(self, length: int) -> tuple[_Content, int, int] | None:
        """Remove and return the group with the fewest free tokens that `length` fits into."""
        fitting = self._occupied >> length
        if not fitting:
            return None
        free = length + (fitting & -fitting).bit_length() - 1
        content, bins = self._groups[free].pop()
        if not self._groups[free]:
            self._occupied &= ~(1 << free)
        return content, free, bins

    def all(self) -> list[tuple[_Content, int]]:
        return [group for groups in self._groups for group in groups]


def _fill(counts: NDArray[np.int64], capacity: int) -> list[tuple[_Content, int]]:
    """Return the bins of best-fit-decreasing over a histogram of lengths."""
    open_bins = _OpenBins(capacity)
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            content, free, bins = open_bins.take_tightest(length) or (None, capacity, left)
            # a bin stays the tightest fit while rows of this length fit: fill it at once
            count = free // length
            full = min(bins, left // count)
            open_bins.put(_Content(content, length, count), free - count * length, full)
            left -= full * count
            if left and full < bins:
                open_bins.put(_Content(content, length, left), free - left * length, 1)
                left, full = 0, full + 1
            if content is not None:
                open_bins.put(content, free, bins - full)
    return open_bins.all()


def _assign(
    groups: list[tuple[_Content, int]], lengths: NDArray[Any], counts: NDArray[np.int64]
) -> tuple[Indices, Indices]:
    """Assign rows to bins, lowest index first among equal lengths."""
    keys = lengths.astype(np.uint16) if len(counts) <= 1 << 16 else lengths  # radix sort for 16 bits
    by_length = np.argsort(keys, kind="stable")
    next_row = (np.cumsum(counts) - counts).tolist()
    parts, sizes, bins_of = [], [], []
    for content, bins in groups:
        size, part = 0, []
        layer: _Content | None = content
        while layer is not None:
            start = next_row[layer.length]
            end = next_row[layer.length] = start + bins * layer.count
            part.append(by_length[start:end].reshape(bins, layer.count))
            size, layer = size + layer.count, layer.below
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
    max_left: Indices,
    random: np.random.Generator,
) -> Indices:
    """Swap rows between bins, because a plan always combines the same lengths, often from the same rows.

    `lengths` are those of the rows in `order`. Each bin keeps its number of rows; its free tokens stay between 0 and
    its `max_left`.
    """
    order, lengths = order.copy(), lengths.astype(np.int64)
    bins = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(order)))
    left = capacity - np.add.reduceat(lengths, starts)
    for _ in range(min(_MAX_ROUNDS, _MAX_SHUFFLED_ROWS // len(order))):
        here, there = _exchanges(lengths, bins, left, max_left, random)
        order[here], order[there] = order[there], order[here]
        longer = lengths[there] - lengths[here]
        lengths[here] += longer
        lengths[there] -= longer
        left[bins[here]] -= longer
        left[bins[there]] += longer
    return order


def _exchanges(
    lengths: Indices, bins: Indices, left: Indices, max_left: Indices, random: np.random.Generator
) -> tuple[Indices, Indices]:
    """Return pairs of positions to swap; each bin is in at most one pair, so that all can be swapped at once."""
    # rows of a pair differ by at most about `spread` tokens, which fit into the bins
    spread = 2 * float(left.mean()) + 1
    near = np.argsort(lengths + random.random(len(lengths)) * spread)
    here, there = random.permutation(near[: len(near) // 2 * 2].reshape(-1, 2)).T
    longer = lengths[there] - lengths[here]
    left_here, left_there = left[bins[here]] - longer, left[bins[there]] + longer
    fits = (bins[here] != bins[there]) & (left_here >= 0) & (left_there >= 0)
    fits &= (left_here <= max_left[bins[here]]) & (left_there <= max_left[bins[there]])
    here, there = here[fits], there[fits]
    number = np.arange(len(here))
    first = np.full(len(left), len(here))
    np.minimum.at(first, bins[here], number)
    np.minimum.at(first, bins[there], number)
    alone = (first[bins[here]] == number) & (first[bins[there]] == number)
    return here[alone], there[alone]
