"""Lengths of rows, and what is advised by them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.data import length_statistics
from app.data.collate import Padded
from app.data.data_report import RowCounts
from app.data.loader import Loader, StepSplit
from tests.data.test_collate import rows_of

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)


def surveyed(lengths: Sequence[int], longest: int) -> tuple[Any, RowCounts]:
    """What a policy of dropping leaves of samples of these lengths."""
    counts = RowCounts(longest=max(lengths))
    for length in lengths:
        if length > longest:
            counts.too_long(length)
            counts.dropped += 1
    kept = np.array([length for length in lengths if length <= longest], np.int32)
    return kept, counts


@given(LENGTHS, st.integers(1, 300))
def test_percentiles_include_dropped_samples(lengths: list[int], longest: int) -> None:
    found = length_statistics.percentiles(*surveyed(lengths, longest))
    assert found is not None
    assert list(found) == ["p5", "p25", "p50", "p75", "p90", "p95", "p99", "max"]
    assert found["max"] == max(lengths)
    for percent in (5, 25, 50, 75, 90, 95, 99):
        exact = int(np.percentile(lengths, percent, method="inverted_cdf"))
        most = exact if exact <= longest else min(exact + max(7, exact / 32), max(lengths))
        assert exact <= found[f"p{percent}"] <= most


@given(LENGTHS, st.integers(1, 300), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_length_that_keeps_share(lengths: list[int], longest: int, share: float) -> None:
    kept, counts = surveyed(lengths, longest)
    length = length_statistics.length_that_keeps(share, kept, counts)
    assert length is not None
    assert np.mean(np.array(lengths) <= length) >= share - 1e-9
    assert length_statistics.share_within(length, kept, counts) >= share - 1e-9
    within = length_statistics.share_within(longest, kept, counts)
    assert within == pytest.approx(np.mean(np.array(lengths) <= longest))


def test_length_statistics_of_no_rows() -> None:
    none = np.empty(0, np.int32)
    assert length_statistics.percentiles(none, RowCounts()) is None
    assert length_statistics.length_that_keeps(0.99, none, RowCounts()) is None
    assert length_statistics.padded_fill(none, 2, 4) is None
    assert length_statistics.packed(none, 8) == length_statistics.Packing(0, 0, None)


@given(LENGTHS)
def test_histogram_has_every_sample(lengths: list[int]) -> None:
    found = length_statistics.histogram(np.array(lengths, np.int32))
    assert np.histogram(lengths, found["edges"])[0].tolist() == found["samples"]
    assert sum(found["samples"]) == len(lengths)
    assert len(found["samples"]) <= 32


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 3))
def test_padded_fill_equals_loader(groups: int, per_batch: int, micro: int) -> None:
    """Where all micro-batches hold rows of one length the order does not matter."""
    lengths = np.full(groups * per_batch * micro, 5, np.int32)
    found = length_statistics.padded_fill(lengths, per_batch, per_batch * micro)
    loader = Loader(rows_of(lengths.tolist()), Padded(per_batch, 0), StepSplit(micro), seed=0)
    batches = [batch for step in range(loader.steps_per_epoch) for batch in loader.batches(step)]
    real = sum(b.num_tokens for b in batches) / sum(b.ids.numel() for b in batches)
    assert found == pytest.approx(real) == pytest.approx(5 / 8)
