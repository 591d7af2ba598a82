"""Several sources as one: which rows are equal, which source each is from, how often an epoch has it.

A weight is a number of times: 2 has each row of the source twice in an epoch, 0.25 has a quarter of its rows, those
with the lowest hashes. So shares are exact, do not depend on a seed, and a row that is added hardly changes them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.data.data_report import MAX_PLACES, Counts, Share
from app.data.token_dataset import TokenRows

_ODD = np.uint64(0x9E3779B97F4A7C15)  # apart from the hash that holds rows out


@dataclass(frozen=True, slots=True)
class Pool:
    """The rows of all sources, each once, one source after the other."""

    rows: TokenRows
    owner: NDArray[np.int64]  # of each row, which source it is from
    counts: Mapping[str, Counts]  # by source
    weights: Sequence[float]

    @classmethod
    def of(cls, sources: Mapping[str, tuple[TokenRows, Counts]], weights: Sequence[float]) -> "Pool":
        """One source is a mix of itself."""
        parts = [rows for rows, _ in sources.values()]
        owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        rows = parts[0] if len(parts) == 1 else TokenRows.concat(parts)
        return cls(rows, owner, {name: counts for name, (_, counts) in sources.items()}, weights)

    def keep(self, kept: NDArray[np.bool_]) -> "Pool":
        """Only some of the rows; the counts are those of what is left."""
        rows = self.rows.select(np.flatnonzero(kept))
        pool = Pool(rows, self.owner[kept], self.counts, self.weights)
        for number, counts in enumerate(self.counts.values()):
            recount(counts, rows.select(pool.of_source(number)))
        return pool

    def without_equals(self, *, drop: bool) -> "Pool":
        """Count rows that are equal to an earlier one, of whatever source; leave them out if asked."""
        again = self.rows.is_duplicate
        for counts, number in zip(self.counts.values(), self._per_source(again), strict=True):
            counts.duplicates = number
            counts.duplicates_dropped = number if drop else 0
        return self.keep(~again) if drop and again.any() else self

    def held_out(self, out: NDArray[np.bool_]) -> "Pool":
        """What stays to be trained on."""
        for counts, number in zip(self.counts.values(), self._per_source(out), strict=True):
            counts.held_out = number
        return self.keep(~out)

    def of_source(self, number: int) -> NDArray[np.int64]:
        """Which rows are from there."""
        return np.flatnonzero(self.owner == number)

    def epoch(self) -> tuple[TokenRows, dict[str, Share]]:
        """The rows as often as the weights say, and what each source has of them."""
        if "" in self.counts:  # a single source, which is no mix
            return self.rows, {}
        drawn = [times(self.rows, self.of_source(n), weight) for n, weight in enumerate(self.weights)]
        shares = {
            name: _share(weight, self.rows.select(self.of_source(number)), self.rows.select(drawn[number]))
            for number, (name, weight) in enumerate(zip(self.counts, self.weights, strict=True))
        }
        return self.rows.select(np.concatenate(drawn)), shares

    def total(self) -> Counts:
        """Of all sources together."""
        return total(list(self.counts.values()))

    def _per_source(self, chosen: NDArray[np.bool_]) -> list[int]:
        counted: list[int] = np.bincount(self.owner[chosen], minlength=len(self.counts)).tolist()
        return counted


def times(rows: TokenRows, chosen: NDArray[np.int64], weight: float) -> NDArray[np.int64]:
    """The chosen rows `weight` times; for what is left of it, the rows of the lowest hashes."""
    whole = int(weight)
    rest = round((weight - whole) * len(chosen))
    # samples of one conversation share the hash, so they come and go together but for the last one
    order = np.argsort(rows.split_hashes[chosen] * _ODD, kind="stable")
    return np.concatenate([np.repeat(chosen, whole), np.sort(chosen[order[:rest]])])


def recount(counts: Counts, rows: TokenRows) -> None:
    """What is left after rows went."""
    counts.samples = len(rows)
    counts.tokens = int(rows.lengths.sum(dtype=np.int64))
    counts.trained_tokens = rows.num_trained
    counts.label_weight = rows.label_weight
    counts.weighted_samples = rows.num_weighted
    counts.classes = rows.class_counts()


def total(parts: Sequence[Counts]) -> Counts:
    """Sums, and the longest of all; of lists the beginning."""
    if len(parts) == 1:
        return parts[0]
    merged: dict[str, Any] = {
        each.name: _together(each.name, [getattr(c, each.name) for c in parts]) for each in fields(Counts)
    }
    return Counts(**merged)


def _together(name: str, values: Sequence[Any]) -> Any:
    if isinstance(values[0], int | float):
        return max(values) if name == "longest" else sum(values)
    if isinstance(values[0], list):
        return [item for value in values for item in value][:MAX_PLACES]
    if isinstance(values[0], dict):
        merged: dict[str, Any] = {}
        for key, inner in (item for value in values for item in value.items()):
            merged[key] = merged.get(key, 0) + inner if isinstance(inner, int) else merged.get(key, inner)
        return merged
    texts = [value for value in values if value]
    return " + ".join(texts) if name == "source" else next(iter(texts), "")


def _share(weight: float, rows: TokenRows, drawn: TokenRows) -> Share:
    tokens = int(drawn.lengths.sum(dtype=np.int64))
    return Share(weight, len(rows), len(drawn), tokens, drawn.num_trained)
