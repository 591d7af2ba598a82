"""Every batch of a packed run has one shape: tokens, places for documents, and the longest of them."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.batch import Batch, Documents
from app.data.layout import Packed
from app.data.loader import Loader, Share, eval_batches
from app.data.rows import TokenRows


class Rows:
    """What a layout reads of token rows."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = np.array(lengths, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def ids(self, i: int) -> Any:
        return np.full(self.lengths[i], i + 1, dtype=np.int32)

    def trained(self, i: int) -> Any:
        return np.arange(self.lengths[i]) > 0


def rows_of(lengths: Sequence[int]) -> TokenRows:
    return cast(TokenRows, Rows(lengths))


def documents(batch: Batch) -> Documents:
    assert batch.documents is not None
    return batch.documents


@given(
    st.lists(st.integers(2, 20), min_size=1, max_size=40),
    st.integers(20, 90),
    st.integers(20, 90),
    st.integers(1, 4),
)
def test_all_batches_of_all_epochs_have_one_shape(
    lengths: list[int], tokens: int, longest: int, micro: int
) -> None:
    layout = Packed(tokens, pad_id=0, longest=min(longest, tokens))
    loader = Loader(rows_of(lengths), layout, Share(micro), seed=0)
    batches = [b for step in range(2 * loader.steps_per_epoch) for b in loader.batches(step)]
    shapes = {(b.ids.shape, documents(b).bounds.shape, documents(b).longest) for b in batches}
    assert len(shapes) == 1
    for batch in batches:
        packed = documents(batch)
        assert sum(packed.lengths) == tokens
        assert max(packed.lengths) <= packed.longest == min(longest, tokens)
        assert int(batch.positions.max()) < packed.longest, "filling has no position that a row cannot have"
        ends = np.cumsum(packed.lengths).tolist()
        assert packed.bounds.tolist() == [0, *ends, *[tokens] * (len(packed.bounds) - 1 - len(ends))]


def test_there_are_no_more_places_than_the_fullest_bin_needs() -> None:
    """Kernels start blocks for every place."""
    layout = Packed(tokens=16, pad_id=0, longest=8)
    bins = layout.units(rows_of([8, 8, 2, 2, 2, 2]), np.arange(6))
    assert len(bins) == 2
    assert bins.most_documents == 5  # four rows and what fills up the other 8 tokens
    batches = list(eval_batches(rows_of([8, 8, 2, 2, 2, 2]), layout))
    assert {len(documents(b).bounds) for b in batches} == {6}
    assert {documents(b).lengths for b in batches} == {(8, 8), (2, 2, 2, 2, 8)}


def test_a_bin_without_rows_is_filled_by_documents_of_allowed_length() -> None:
    layout = Packed(tokens=20, pad_id=7, longest=8)
    batch = layout.batch(rows_of([]), [], layout.units(rows_of([]), np.arange(0)).most_documents, epoch=0)
    assert documents(batch).lengths == (8, 8, 4)
    assert batch.ids.eq(7).all()
    assert (batch.lengths, batch.num_labels, batch.num_tokens) == ((), 0, 0)


def test_documents_alone_are_their_own_measure() -> None:
    alone = Documents.of([3, 1, 2])
    assert alone == alone.to(torch.device("cpu"))
    assert (alone.bounds.tolist(), alone.bounds.dtype, alone.longest) == ([0, 3, 4, 6], torch.int32, 3)
    assert alone.to(torch.device("meta")).bounds.device.type == "meta"
    with pytest.raises(AssertionError, match="longer"):
        Documents.of([3, 1], longest=2)
    with pytest.raises(AssertionError, match="places"):
        Documents.of([3, 1], places=1)


def test_moving_a_packed_batch_moves_its_bounds() -> None:
    layout = Packed(tokens=8, pad_id=0, longest=8)
    batch = layout.batch(rows_of([5]), [np.array([0])], 2, epoch=0).to(torch.device("meta"))
    assert documents(batch).bounds.device.type == "meta"
    assert documents(batch).lengths == (5, 3)
