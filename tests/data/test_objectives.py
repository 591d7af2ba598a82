"""What is masked of a row follows from seed, epoch and row alone, and is what BERT was trained on."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from app.assets import locate
from app.config.schema import TaskConfig
from app.data.collate import Layout, Packed, Padded
from app.data.loader import Loader, StepSplit, eval_batches
from app.data.token_dataset import TokenRows
from app.errors import ConfigError
from app.tasks.masked import MaskedTokens
from app.tasks.table import build_objective
from tests.data.test_collate import Rows

MASK, SPECIAL = 4, (0, 1, 2, 3, 4)
ORDINARY = np.arange(5, 100, dtype=np.int32)


class MarkedRows(Rows):
    """Row i holds ids of its own between two special ones."""

    def ids(self, i: int) -> Any:
        inside = 5 + (np.arange(self.lengths[i] - 2) * 7 + i) % 90
        return np.array([1, *inside, 2], dtype=np.int32)


def rows_of(lengths: Sequence[int]) -> TokenRows:
    return cast(TokenRows, MarkedRows(lengths))


def masked(share: float = 0.15, seed: int = 0) -> MaskedTokens:
    return MaskedTokens(share, MASK, np.array(SPECIAL), ORDINARY, seed)


@given(st.integers(3, 200), st.floats(0.01, 1.0), st.integers(0, 5), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_masked_tokens_share_predicted_in_place(length: int, share: float, row: int, epoch: int, seed: int) -> None:
    rows = rows_of([length] * (row + 1))
    ids, (found,) = rows.ids(row), masked(share, seed).label(rows, row, epoch)
    assert len(found.at) == max(1, round(share * (length - 2)))
    assert sorted(set(found.at.tolist())) == found.at.tolist()
    assert found.targets.tolist() == ids[found.at].tolist()
    assert not np.isin(found.targets, SPECIAL).any()
    others = np.setdiff1d(np.arange(length), found.at)
    assert found.ids[others].tolist() == ids[others].tolist()
    assert set(found.ids[found.at].tolist()) <= {MASK, *ORDINARY.tolist()}
    (again,) = masked(share, seed).label(rows, row, epoch)
    assert (again.at.tolist(), again.ids.tolist()) == (found.at.tolist(), found.ids.tolist())


def test_masked_tokens_follow_bert_and_epoch() -> None:
    rows = rows_of([4002])
    ids, draws = rows.ids(0), [masked(0.5).label(rows, 0, epoch)[0] for epoch in range(2)]
    seen, was = draws[0].ids[draws[0].at], ids[draws[0].at]
    assert (seen == MASK).mean() == pytest.approx(0.8, abs=0.03)
    assert (seen == was).mean() == pytest.approx(0.1, abs=0.03)
    assert len(np.intersect1d(draws[0].at, draws[1].at)) == pytest.approx(1000, abs=100)


def test_masked_tokens_of_equal_rows_are_drawn_separately() -> None:
    first, second = (masked(0.5).label(rows_of([402, 402]), row, epoch=0)[0] for row in range(2))
    assert len(np.intersect1d(first.at, second.at)) == pytest.approx(100, abs=40)


def test_masked_tokens_special_row_has_none() -> None:
    (found,) = masked().label(rows_of([2]), 0, 0)
    assert (found.ids.tolist(), found.at.tolist(), found.targets.tolist()) == ([1, 2], [], [])


WORDPIECE: Any = AutoTokenizer.from_pretrained(locate("asset:wordpiece"), local_files_only=True)
WORDS = TaskConfig(kind="masked", mask_share=0.15, whole_words=True)


@pytest.mark.parametrize(
    "text", ["Zanzibar sold nineteen xylophones, unbelievably; the tokenizer splits every word.", "a"]
)
@pytest.mark.parametrize("share", [0.15, 0.5, 1.0])
def test_whole_words_masked_whole_and_near_the_share(text: str, share: float) -> None:
    encoding = WORDPIECE(text * 3)
    rows: Any = SimpleNamespace(ids=lambda _i: np.array(encoding.input_ids, np.int32))
    objective = build_objective(replace(WORDS, mask_share=share), WORDPIECE, 3, bidirectional=True)
    words = np.array([-1 if word is None else word for word in encoding.word_ids()])
    asked, draws = share * (words >= 0).sum(), set()
    for epoch in range(20):
        (found,) = objective.label(rows, 0, epoch)
        (again,) = objective.label(rows, 0, epoch)
        assert (found.at.tolist(), found.ids.tolist()) == (again.at.tolist(), again.ids.tolist())
        drawn = set(words[found.at].tolist())
        assert found.at.tolist() == np.flatnonzero(np.isin(words, list(drawn))).tolist()
        assert abs(len(found.at) - max(1, asked)) <= np.bincount(words[words >= 0]).max()
        draws.add(tuple(found.at.tolist()))
    assert share == 1 or len(words) < 10 or len(draws) > 10


def test_whole_words_of_other_tokenizers_refused() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(locate("asset:tiny"), local_files_only=True)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    with pytest.raises(ConfigError, match=r"task\.whole_words=true: the tokenizer is BPE, whose tokens do not show"):
        build_objective(WORDS, tokenizer, 0, bidirectional=True)


def predicted(batches: Any) -> list[tuple[int, ...]]:
    """Of every labeled place: what is seen there, its neighbors, and what must be said."""
    found = []
    for batch in batches:
        seen = batch.ids.flatten().tolist()
        for at, target in zip(batch.label_rows.tolist(), batch.targets.tolist(), strict=True):
            if target >= 0:
                found.append((seen[at - 1], seen[at], seen[at + 1], target))
    return sorted(found)


@pytest.mark.parametrize("epoch", [0, 1])
def test_masked_tokens_independent_of_layout(epoch: int) -> None:
    rows = rows_of([5, 9, 3, 14, 14, 20, 7])
    layouts: list[Layout] = [
        Padded(2, 0, masked()),
        Padded(7, 0, masked()),
        Packed(20, 0, 20, masked()),
        Packed(64, 0, 20, masked()),
    ]
    found = []
    for layout in layouts:
        loader = Loader(rows, layout, StepSplit(1), seed=3)
        steps = range(epoch * loader.steps_per_epoch, (epoch + 1) * loader.steps_per_epoch)
        found.append(predicted(b for step in steps for b in loader.batches(step)))
        assert predicted(eval_batches(rows, layout)) == predicted(eval_batches(rows, layouts[0]))
    assert len(found[0]) >= len(rows)
    assert all(one == found[0] for one in found[1:])


def test_bidirectional_padding_is_own_document() -> None:
    batch = next(iter(eval_batches(rows_of([5, 16, 9]), Padded(3, 0, masked()))))
    assert batch.documents is not None
    assert batch.documents.lengths == (16, 9, 7, 5, 11)
    assert (batch.ids.shape, len(batch.documents.cu_seqlens), batch.documents.max_seqlen) == ((3, 16), 7, 16)
    assert next(iter(eval_batches(rows_of([5]), Padded(3, 0)))).documents is None


def test_masked_tokens_without_mask_token_refused() -> None:
    class Plain:
        mask_token_id = None

    with pytest.raises(ConfigError, match=r"task\.kind=masked: the tokenizer has no mask token"):
        build_objective(TaskConfig(kind="masked", mask_share=0.15), Plain(), 0, bidirectional=True)
