"""Every row once an epoch, in an order of its own; the batch holds what the rows say."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.batch import IGNORE
from app.data.collate import BinShape, Packed, Padded, collate_packed, collate_padded
from app.data.loader import Loader, batch_with_most_rows, eval_batches
from app.data.objectives import label_next_tokens
from app.data.prepare import Data


def seen(loader: Loader, epoch: int) -> list[str]:
    steps = loader.steps_per_epoch
    return [place for step in range(epoch * steps, (epoch + 1) * steps) for place in loader.source_locations(step)]


@pytest.mark.parametrize(("rows", "micro"), [(8, 1), (7, 3), (64, 1), (100, 1), (1, 1)])
def test_loader_reads_each_row_once_an_epoch_in_new_order(
    rows: int, micro: int, loader_of: Callable[..., Loader], data: Data
) -> None:
    loader = loader_of(rows, micro)
    every = sorted(data.train.source_location(i) for i in range(len(data.train)))
    first, second = seen(loader, 0), seen(loader, 1)
    assert sorted(first) == sorted(second) == every
    assert first != second
    assert first == seen(loader_of(rows, micro), 0), "the order follows from seed and epoch alone"
    batches = [b for step in range(loader.steps_per_epoch) for b in loader.batches(step)]
    assert sum(b.num_tokens for b in batches) == int(data.train.lengths.sum())
    assert sum(b.num_labels for b in batches) == data.train.num_trained
    assert len(batches) == loader.steps_per_epoch * micro, "the last step is filled up, never cut"


ROW = st.integers(2, 12).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(5, 99), min_size=n, max_size=n), st.lists(st.booleans(), min_size=n - 1, max_size=n - 1)
    )
)


@given(st.lists(ROW, max_size=5))
def test_labels_follow_the_state_before_them(rows: list[tuple[list[int], list[bool]]]) -> None:
    arrays = [(np.array(ids, np.int32), np.array([False, *trained])) for ids, trained in rows]
    batch = collate_padded([label_next_tokens(*row) for row in arrays], pad_id=0)
    expected = {(r, t - 1, int(ids[t])) for r, (ids, trained) in enumerate(arrays) for t in np.flatnonzero(trained)}
    width = batch.ids.shape[1]
    pairs: Any = zip(batch.label_rows.tolist(), batch.targets.tolist(), strict=True)
    targets = {(row // width, row % width, target) for row, target in pairs if target != IGNORE}
    assert targets == expected
    assert batch.num_labels == len(expected)
    assert batch.num_tokens == sum(len(ids) for ids, _ in arrays)
    assert batch.lengths == tuple(len(ids) for ids, _ in arrays)
    for r, (ids, _) in enumerate(arrays):
        assert batch.ids[r, : len(ids)].tolist() == ids.tolist()
        assert batch.ids[r, len(ids) :].eq(0).all()
        assert batch.positions[r, : len(ids)].tolist() == list(range(len(ids)))
    assert int(batch.positions.max()) == max((len(ids) for ids, _ in arrays), default=1) - 1
    assert len(batch.label_rows) >= 1, "an empty batch still hangs on the graph"


@given(st.lists(ROW, max_size=5), st.integers(0, 20))
def test_packed_rows_keep_positions_and_labels(rows: list[tuple[list[int], list[bool]]], spare: int) -> None:
    arrays = [(np.array(ids, np.int32), np.array([False, *trained])) for ids, trained in rows]
    capacity = sum(len(ids) for ids, _ in arrays) + spare
    shape = BinShape(max(capacity, 1), max_length=12, max_documents=len(rows) + 2)
    batch = collate_packed([label_next_tokens(*row) for row in arrays], pad_id=0, shape=shape)
    assert batch.ids.shape == (1, max(capacity, 1))
    assert batch.documents is not None
    documents = batch.documents.lengths
    assert sum(documents) == batch.ids.shape[1]
    assert documents[: len(rows)] == tuple(len(ids) for ids, _ in rows)
    assert all(0 < n <= shape.max_length for n in documents)
    assert batch.positions[0].tolist() == [i for n in documents for i in range(n)]
    starts = np.cumsum([0, *documents]).tolist()
    expected = {
        (starts[r] + t - 1, int(ids[t])) for r, (ids, trained) in enumerate(arrays) for t in np.flatnonzero(trained)
    }
    pairs: Any = zip(batch.label_rows.tolist(), batch.targets.tolist(), strict=True)
    assert {(row, target) for row, target in pairs if target != IGNORE} == expected
    assert batch.num_labels == len(expected)
    assert batch.num_tokens == batch.ids.shape[1] - (spare if capacity else 1)


def test_crowded_batch_has_most_rows(data: Data) -> None:
    layout = Packed(256, pad_id=0, max_length=256)
    crowded = batch_with_most_rows(data.train, layout)
    bins = list(eval_batches(data.train, layout))
    assert len(crowded.lengths) == max(len(batch.lengths) for batch in bins) > 2
    assert len(batch_with_most_rows(data.train, Padded(3, pad_id=0)).lengths) == 3


def test_largest_micro_batch_of_an_epoch(
    loader_of: Callable[..., Loader], packed_loader_of: Callable[..., Loader]
) -> None:
    packed, padded = packed_loader_of(tokens=256, micro_batches=2), loader_of(rows=4, micro_batches=2)
    batches = [batch for step in range(packed.steps_per_epoch) for batch in packed.batches(step)]
    assert packed.largest().num_labels == max(batch.num_labels for batch in batches)
    batches = [batch for step in range(padded.steps_per_epoch) for batch in padded.batches(step)]
    assert padded.largest().ids.numel() == max(batch.ids.numel() for batch in batches)
    assert padded.largest().num_tokens >= max(batch.num_tokens for batch in batches)
