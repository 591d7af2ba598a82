"""Lengths of token rows: percentiles, histogram, and fill of bins and padded batches."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.data.collate import WIDTH_MULTIPLE
from app.data.data_report import RowCounts
from app.data.packing import min_bins, plan_bins

_PERCENTS = (5, 25, 50, 75, 90, 95, 99)
_MAX_CLASSES = 32


@dataclass(frozen=True, slots=True)
class Packing:
    """Number and fill of bins, and the lower bound of their number."""

    bins: int
    least: int
    fill: float | None  # None: no bins


def packed(lengths: NDArray[np.int32], capacity: int) -> Packing:
    """Return the packing of a run with bins of `capacity`."""
    bins = len(plan_bins(lengths, capacity)[1])
    fill = int(lengths.sum(dtype=np.int64)) / (bins * capacity) if bins else None
    return Packing(bins, min_bins(lengths, capacity), fill)


def padded_fill(lengths: NDArray[np.int32], per_batch: int, per_step: int) -> float | None:
    """Return the share of tokens in padded micro-batches, for steps of `per_step` rows sorted by length."""
    if not len(lengths):
        return None
    shuffled = np.random.default_rng(0).permutation(lengths)
    steps = -(-len(shuffled) // per_step)
    whole = np.zeros(steps * per_step, np.int64)
    whole[: len(shuffled)] = shuffled
    batches = np.sort(whole.reshape(steps, per_step), axis=1)[:, ::-1].reshape(-1, per_batch)
    widths = -(-batches[:, 0] // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    return int(whole.sum()) / int((widths * (batches > 0).sum(axis=1)).sum())


def percentiles(rows: NDArray[np.int32], counts: RowCounts) -> dict[str, int] | None:
    """Return length percentiles of all samples before truncation and dropping; None without samples.

    Overlong samples count with the upper end of their class (8 tokens wide, or 1/32 of the length); the maximum is
    exact. Split texts count by piece.
    """
    lengths, samples = _before_policy(rows, counts)
    if not len(lengths):
        return None
    reached = np.cumsum(samples)
    at = [int(np.searchsorted(reached, reached[-1] * percent / 100)) for percent in _PERCENTS]
    longest = int(lengths[-1]) if counts.pieces else counts.longest
    by_percent = {f"p{percent}": int(lengths[i]) for percent, i in zip(_PERCENTS, at, strict=True)}
    return {**by_percent, "max": longest}


def length_that_keeps(share: float, rows: NDArray[np.int32], counts: RowCounts) -> int | None:
    """Return the smallest dataset.max_length that keeps this share of samples whole, to class precision."""
    lengths, samples = _before_policy(rows, counts)
    if not len(lengths) or counts.pieces:
        return None
    reached = np.cumsum(samples)
    return int(lengths[np.searchsorted(reached, reached[-1] * share - 1e-9)])


def share_within(length: int, rows: NDArray[np.int32], counts: RowCounts) -> float:
    """Return the share of samples with at most `length` tokens."""
    lengths, samples = _before_policy(rows, counts)
    return float(samples[lengths <= length].sum() / samples.sum())


def histogram(rows: NDArray[np.int32]) -> dict[str, list[int]]:
    """Count samples in classes of equal width."""
    width = max(1, -(-int(rows.max(initial=1)) // _MAX_CLASSES))
    samples = np.bincount(np.maximum(rows - 1, 0) // width, minlength=1)
    return {"edges": [1 + width * at for at in range(len(samples) + 1)], "samples": samples.tolist()}


def over_long(counts: RowCounts) -> list[dict[str, int]]:
    """Return the length classes of overlong samples, in ascending order."""
    ends: Mapping[str, int] = counts.over_long_up_to
    return [{"up_to": int(end), "samples": ends[end]} for end in sorted(ends, key=int)]


def _before_policy(rows: NDArray[np.int32], counts: RowCounts) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return lengths in ascending order and their sample counts, before the overflow policy."""
    samples = np.bincount(rows)
    if counts.pieces:
        distinct = np.flatnonzero(samples)
        return distinct, samples[distinct]
    if counts.truncated and len(samples):
        samples[-1] = max(0, samples[-1] - counts.truncated)  # truncated ones have max_length
    shorter = np.flatnonzero(samples)
    ends = over_long(counts)
    lengths = np.concatenate([shorter, np.array([min(end["up_to"], counts.longest) for end in ends], np.int64)])
    return lengths, np.concatenate([samples[shorter], np.array([end["samples"] for end in ends], np.int64)])
