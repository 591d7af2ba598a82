"""How far figures would move with other rows of the same kind: the rows are drawn again and again, with replacement."""

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2_000
LEVEL = 0.95
_GROUPS = 2_048  # more rows than that are drawn in groups, see `resampled`
_AT_ONCE = 250  # resamples, so that their weights stay in the cache
_SEED = 0  # the same for all runs: what has the same rows is compared on the same draws


def resampled(
    sums: NDArray[np.float64], clusters: NDArray[np.uint64], groups: int = _GROUPS
) -> NDArray[np.float64]:
    """[RESAMPLES, columns]: the sums over all rows, had other rows been drawn. Rows of a cluster come and go together.

    `clusters` are hashes: their order is by chance, the same however the rows lie in their file. Many clusters are
    drawn in `groups` of neighbours: sums over many rows spread as much either way, at a cost that does not grow.
    """
    drawn = _grouped(sums, clusters, groups)
    count, random = len(drawn), np.random.default_rng(_SEED)
    found = []
    for _ in range(RESAMPLES // _AT_ONCE):
        chosen = random.integers(0, count, size=(_AT_ONCE, count), dtype=np.int32)
        chosen += np.arange(_AT_ONCE, dtype=np.int32)[:, None] * count
        times = np.bincount(chosen.ravel(), minlength=_AT_ONCE * count).reshape(_AT_ONCE, count)
        with np.errstate(invalid="ignore"):  # a loss may be infinite
            found.append(times.astype(np.float64) @ drawn)
    return np.concatenate(found)


def num_clusters(clusters: NDArray[np.uint64]) -> int:
    """How many there are to draw from."""
    return len(np.unique(clusters))


def interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Between which LEVEL of the values lie."""
    ordered = np.sort(values)
    outside = round(len(ordered) * (1 - LEVEL) / 2)
    return float(ordered[outside - 1]), float(ordered[-outside])


def bound_of_none(clusters: int) -> float:
    """The largest share that `clusters` draws without a hit leave possible, at one end of LEVEL."""
    return float(1 - ((1 - LEVEL) / 2) ** (1 / clusters))


def _grouped(sums: NDArray[np.float64], clusters: NDArray[np.uint64], groups: int) -> NDArray[np.float64]:
    """The sums of what is drawn as one, in the order of the hashes."""
    names, cluster = np.unique(clusters, return_inverse=True)
    of_group = cluster * min(groups, len(names)) // len(names)
    return np.stack([np.bincount(of_group, weights=column) for column in sums.T], axis=1)
