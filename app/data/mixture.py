"""Several sources as one: which rows are equal, which source each is from, how often an epoch has it.

A weight is a number of times: 2 has each row of the source twice in an epoch, 0.25 has a quarter of its rows, those
with the lowest hashes. So shares are exact, do not depend on a seed, and a row that is added hardly changes them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.data.data_report import MAX_PLACES, RowCounts, SourceShare
from app.data.token_dataset import TokenRows

_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # makes the draw independent of the one that holds rows out


@dataclass(frozen=True, slots=True)
class Pool:
    """The rows of all sources, each once, one source after the other."""

    rows: TokenRows
    source_of: NDArray[np.int64]  # of each row, the number of its source
    counts: Mapping[str, RowCounts]  # by source
    weights: Sequence[float]

    @classmethod
    def from_sources(cls, sources: Mapping[str, tuple[TokenRows, RowCounts]], weights: Sequence[float]) -> "Pool":
        parts = [rows for rows, _ in sources.values()]
        source_of = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        rows = parts[0] if len(parts) == 1 else TokenRows.concat(parts)
        return cls(rows, source_of, {name: counts for name, (_, counts) in sources.items()}, weights)

    def keep(self, kept: NDArray[np.bool_]) -> "Pool":
        """Keep only some of the rows, and count again."""
        rows = self.rows.select(np.flatnonzero(kept))
        pool = Pool(rows, self.source_of[kept], self.counts, self.weights)
        for number, counts in enumerate(self.counts.values()):
            recount(counts, rows.select(pool.rows_of(number)))
        return pool

    def deduplicated(self, *, drop: bool) -> "Pool":
        """Count rows that are equal to an earlier one of any source, and drop them if asked."""
        duplicate = self.rows.is_duplicate
        for counts, number in zip(self.counts.values(), self._per_source(duplicate), strict=True):
            counts.duplicates = number
            counts.duplicates_dropped = number if drop else 0
        return self.keep(~duplicate) if drop and duplicate.any() else self

    def without_held_out(self, out: NDArray[np.bool_]) -> "Pool":
        for counts, number in zip(self.counts.values(), self._per_source(out), strict=True):
            counts.held_out = number
        return self.keep(~out)

    def rows_of(self, number: int) -> NDArray[np.int64]:
        """Indices of the rows of a source."""
        return np.flatnonzero(self.source_of == number)

    def epoch(self) -> tuple[TokenRows, dict[str, SourceShare]]:
        """The rows of an epoch, repeated by the weights, and the share of each source."""
        if "" in self.counts:  # a single source, which is no mix
            return self.rows, {}
        drawn = [times(self.rows, self.rows_of(n), weight) for n, weight in enumerate(self.weights)]
        shares = {}
        for number, (name, weight) in enumerate(zip(self.counts, self.weights, strict=True)):
            rows = self.rows.select(drawn[number])
            tokens = int(rows.lengths.sum(dtype=np.int64))
            shares[name] = SourceShare(weight, len(self.rows_of(number)), len(rows), tokens, rows.num_trained)
        return self.rows.select(np.concatenate(drawn)), shares

    def total(self) -> RowCounts:
        return total(list(self.counts.values()))

    def _per_source(self, chosen: NDArray[np.bool_]) -> list[int]:
        counted: list[int] = np.bincount(self.source_of[chosen], minlength=len(self.counts)).tolist()
        return counted


def times(rows: TokenRows, chosen: NDArray[np.int64], weight: float) -> NDArray[np.int64]:
    """Repeat the chosen rows `weight` times; of its fraction, take the rows of the lowest hashes."""
    whole = int(weight)
    rest = round((weight - whole) * len(chosen))
    # samples of one conversation share the hash, so all but those of the last are drawn together
    order = np.argsort(rows.split_hashes[chosen] * _HASH_FACTOR, kind="stable")
    return np.concatenate([np.repeat(chosen, whole), np.sort(chosen[order[:rest]])])


def recount(counts: RowCounts, rows: TokenRows) -> None:
    """Count samples, tokens, weights and classes again after rows were removed."""
    counts.samples = len(rows)
    counts.tokens = int(rows.lengths.sum(dtype=np.int64))
    counts.trained_tokens = rows.num_trained
    counts.label_weight = rows.label_weight
    counts.weighted_samples = rows.num_weighted
    counts.classes = rows.class_counts()


def total(parts: Sequence[RowCounts]) -> RowCounts:
    """Counts of several sources together: sums, the longest sample, the first places."""
    if len(parts) == 1:
        return parts[0]
    merged: dict[str, Any] = {
        each.name: _together(each.name, [getattr(c, each.name) for c in parts]) for each in fields(RowCounts)
    }
    return RowCounts(**merged)


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
