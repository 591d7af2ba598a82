"""Fewer points that still show what happened: the lowest and the highest of each stretch stay."""

from collections.abc import Sequence
from itertools import pairwise

Point = tuple[float, float | None]  # None: there is a line, and it has no number


def thinned(points: Sequence[Point], stretches: int) -> list[Point]:
    """At most four points of each stretch: first, lowest, highest, last; a stretch without any number is a gap."""
    if len(points) <= 4 * stretches:
        return list(points)
    kept: list[Point] = []
    for start, end in _bounds(len(points), stretches):
        known = [(y, at) for at in range(start, end) if (y := points[at][1]) is not None]
        if known:
            places = {known[0][1], min(known)[1], max(known)[1], known[-1][1]}
            kept += [points[at] for at in sorted(places)]
        else:
            kept.append(points[start])
    return kept


def means(points: Sequence[Point], stretches: int) -> list[Point]:
    """The mean of each stretch, in its middle."""
    found: list[Point] = []
    for start, end in _bounds(len(points), stretches):
        known = [y for _, y in points[start:end] if y is not None]
        middle = (points[start][0] + points[end - 1][0]) / 2
        found.append((middle, sum(known) / len(known) if known else None))
    return found


def _bounds(count: int, stretches: int) -> list[tuple[int, int]]:
    edges = [count * at // stretches for at in range(stretches + 1)]
    return [(start, end) for start, end in pairwise(edges) if end > start]
