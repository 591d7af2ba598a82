"""Every batch of a packed run has one shape: tokens, places for documents, and the longest of them."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.batch import Batch, PackedSequences
from app.data.collate import Packed, Padded
from app.data.loader import ORDERS, Loader, StepSplit, eval_batches
from app.data.token_dataset import TokenRows


class Rows:
    """What a layout reads of token rows."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = np.array(lengths, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def ids(self, i: int) -> Any:
        return np.full(self.lengths[i], i + 1, dtype=np.int32)

    def loss_mask(self, i: int) -> Any:
        return np.arange(self.lengths[i]) > 0

    def weights(self, i: int) -> None:
        return None


def rows_of(lengths: Sequence[int]) -> TokenRows:
    return cast(TokenRows, Rows(lengths))


def documents(batch: Batch) -> PackedSequences:
    assert batch.documents is not None
    return batch.documents


@given(
    st.lists(st.integers(2, 20), min_size=1, max_size=40), st.integers(20, 90), st.integers(20, 90), st.integers(1, 4)
)
def test_packed_batches_of_all_epochs_share_one_shape(
    lengths: list[int], tokens: int, longest: int, micro: int
) -> None:
    layout = Packed(tokens, pad_id=0, max_length=min(longest, tokens))
    loader = Loader(rows_of(lengths), layout, StepSplit(micro), seed=0)
    batches = [b for step in range(3 * loader.steps_per_epoch) for b in loader.batches(step)]
    shapes = {(b.ids.shape, documents(b).cu_seqlens.shape, documents(b).max_seqlen) for b in batches}
    assert len(shapes) == 1
    for batch in batches:
        packed = documents(batch)
        assert sum(packed.lengths) == tokens
        assert max(packed.lengths) <= packed.max_seqlen == min(longest, tokens)
        assert int(batch.positions.max()) < packed.max_seqlen, "filling has no position that a row cannot have"
        ends = np.cumsum(packed.lengths).tolist()
        assert packed.cu_seqlens.tolist() == [0, *ends, *[tokens] * (len(packed.cu_seqlens) - 1 - len(ends))]


def test_packed_max_documents_is_that_of_fullest_bin() -> None:
    """Kernels start blocks for every place."""
    layout = Packed(tokens=16, pad_id=0, max_length=8)
    bins = layout.units(rows_of([8, 8, 2, 2, 2, 2]), np.arange(6))
    assert len(bins) == 2
    assert bins.max_documents == 5  # four rows and what fills up the other 8 tokens
    batches = list(eval_batches(rows_of([8, 8, 2, 2, 2, 2]), layout))
    assert {len(documents(b).cu_seqlens) for b in batches} == {6}
    assert {documents(b).lengths for b in batches} == {(8, 8), (2, 2, 2, 2, 8)}


def test_packed_empty_bin_filled_by_allowed_lengths() -> None:
    layout = Packed(tokens=20, pad_id=7, max_length=8)
    batch = layout.batch(rows_of([]), [], layout.units(rows_of([]), np.arange(0)).max_documents, epoch=0)
    assert documents(batch).lengths == (8, 8, 4)
    assert batch.ids.eq(7).all()
    assert (batch.lengths, batch.num_labels, batch.num_tokens) == ((), 0, 0)


def test_packed_sequences_from_lengths() -> None:
    alone = PackedSequences.from_lengths([3, 1, 2])
    assert alone.to(torch.device("cpu")).lengths == alone.lengths == (3, 1, 2)
    assert (alone.cu_seqlens.tolist(), alone.cu_seqlens.dtype, alone.max_seqlen) == ([0, 3, 4, 6], torch.int32, 3)
    assert alone.to(torch.device("meta")).cu_seqlens.device.type == "meta"
    with pytest.raises(AssertionError, match="longer"):
        PackedSequences.from_lengths([3, 1], max_seqlen=2)
    with pytest.raises(AssertionError, match="max_documents"):
        PackedSequences.from_lengths([3, 1], max_documents=1)


STEPS = st.tuples(
    st.lists(st.integers(2, 20), min_size=1, max_size=60), st.integers(1, 4), st.integers(1, 4), st.booleans()
)


@given(STEPS)
def test_loader_ranks_share_step_with_even_work(case: tuple[list[int], int, int, bool]) -> None:
    lengths, micro, processes, packed = case
    rows = rows_of(lengths)
    layout = Packed(24, pad_id=0, max_length=20) if packed else Padded(2, pad_id=0)
    alone = Loader(rows, layout, StepSplit(micro * processes), seed=0)
    ranks = [Loader(rows, layout, StepSplit(micro, processes, rank), seed=0) for rank in range(processes)]
    for step in range(alone.steps_per_epoch):
        whole = alone.batches(step)
        shares = [loader.batches(step) for loader in ranks]
        assert [len(share) for share in shares] == [micro] * processes
        every = [sorted(batch.lengths) for share in shares for batch in share]
        assert sorted(every) == sorted(sorted(batch.lengths) for batch in whole), "the same micro-batches"
        if packed:
            work = [sum(n * n for batch in share for n in batch.lengths) for share in shares]
            hardest = max(sum(n * n for n in batch.lengths) for batch in whole)
            assert max(work) - min(work) <= hardest
    first = [[batch.ids.tolist() for batch in loader.first_epoch()] for loader in (alone, *ranks)]
    assert all(each == first[0] for each in first)
    assert sum(batch.num_tokens for batch in alone.first_epoch()) == sum(lengths)


@given(st.lists(st.integers(2, 20), min_size=1, max_size=60), st.integers(0, 40))
def test_loader_resumes_from_step_number(lengths: list[int], step: int) -> None:
    """A loader that has come to a step, and one that begins there, give the same."""

    def made() -> Loader:
        return Loader(rows_of(lengths), Packed(24, pad_id=0, max_length=20), StepSplit(2), seed=1)

    through = made()
    for each in range(step):
        through.batches(each)
    pairs = zip(through.batches(step), made().batches(step), strict=True)
    assert all(a.lengths == b.lengths and torch.equal(a.ids, b.ids) for a, b in pairs)


@pytest.mark.parametrize("packed", [True, False])
def test_sequential_order_keeps_rows_of_the_file_in_every_epoch(packed: bool) -> None:
    rows = rows_of([3, 9, 20, 4, 8, 20, 5, 6])
    layout = Packed(24, pad_id=0, max_length=20) if packed else Padded(1, pad_id=0)
    units, order = ORDERS["sequential"](rows, layout, 0, 0)
    bins = [units[int(i)].tolist() for i in order]
    assert [min(each) for each in bins] == sorted(min(each) for each in bins)
    assert sorted(i for each in bins for i in each) == [*range(len(rows))]
    loader = Loader(rows, layout, StepSplit(1), seed=0, order="sequential")
    steps = loader.steps_per_epoch
    epochs = [[loader.batches(epoch * steps + step)[0].ids.tolist() for step in range(steps)] for epoch in (0, 3)]
    expected = [layout.batch(rows, [np.array(each)], units.max_documents, 0).ids.tolist() for each in bins]
    assert epochs == [expected, expected]
