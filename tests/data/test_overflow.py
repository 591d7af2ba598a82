"""Nothing is cut or dropped without being counted."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.data.data_report import RowCounts, stop_reasons
from app.data.row_pipeline import fit, policy_for
from app.data.tokenizer import Tokens
from tests.data.small import config


def sample(length: int, first_trained: int = 1) -> Tokens:
    trained = np.arange(length) >= max(first_trained, 1)
    return Tokens(np.arange(length, dtype=np.int32), trained)


def test_overflow_auto_by_format() -> None:
    assert policy_for("auto", "text") == "split"
    assert policy_for("auto", "messages") == "drop"
    assert policy_for("truncate", "messages") == "truncate"
    with pytest.raises(AssertionError):
        policy_for("split", "messages")


def test_overflow_truncate_without_trained_drops() -> None:
    counts = RowCounts()
    assert fit(sample(9, first_trained=8), 8, "truncate", counts) == []
    assert (counts.over_long, counts.dropped, counts.truncated, counts.tokens_lost) == (1, 1, 0, 9)
    assert len(fit(sample(9, first_trained=7), 8, "truncate", counts)) == 1


@given(length=st.integers(3, 200), max_length=st.integers(2, 60))
def test_overflow_split_trains_each_token_once(length: int, max_length: int) -> None:
    counts = RowCounts()
    pieces = fit(sample(length), max_length, "split", counts)
    assert all(2 <= len(piece.ids) <= max_length for piece in pieces)
    assert not any(piece.loss_mask[0] for piece in pieces)
    trained = np.concatenate([piece.ids[piece.loss_mask] for piece in pieces])
    assert trained.tolist() == list(range(1, length))
    assert counts.tokens_lost == 0


@given(
    lengths=st.lists(st.integers(2, 40), max_size=30),
    first=st.integers(1, 30),
    max_length=st.integers(2, 30),
    policy=st.sampled_from(["drop", "truncate"]),
)
def test_overflow_counts_add_up(lengths: list[int], first: int, max_length: int, policy: str) -> None:
    counts = RowCounts()
    kept = [part for n in lengths for part in fit(sample(n, min(first, n - 1)), max_length, policy, counts)]
    assert len(lengths) == len(kept) + counts.dropped
    assert counts.over_long == counts.dropped + counts.truncated == sum(n > max_length for n in lengths)
    assert sum(lengths) == sum(len(part.ids) for part in kept) + counts.tokens_lost
    assert counts.longest == max(lengths, default=0)
    assert all(len(part.ids) <= max_length for part in kept)


SOURCE: Any = SimpleNamespace(key="dataset.path", name="a.jsonl")
LONG = RowCounts(
    samples=94, rows_read=100, rows_kept=94, dropped=6, over_long=6, longest=1234, first_over_long="a.jsonl:7"
)


@pytest.mark.parametrize(
    ("policy", "fmt", "counts", "stops"),
    [
        ("auto", "messages", LONG, True),
        ("auto", "messages", replace(LONG, samples=95, dropped=5, over_long=5), False),
        ("auto", "messages", replace(LONG, held_out=20, left_over=6), False),  # what is held out was good too
        ("auto", "text", LONG, False),
        ("drop", "messages", LONG, False),
        ("error", "messages", replace(LONG, samples=99, dropped=1, over_long=1), True),
    ],
)
def test_too_long_samples_stop_a_run(policy: str, fmt: str, counts: RowCounts, stops: bool) -> None:
    problems = list(stop_reasons(config("a.jsonl", fmt, on_overflow=policy), SOURCE, counts))
    assert bool(problems) == stops


@pytest.mark.parametrize(
    ("readable", "remedy"),
    [
        (2048, "raise it, or set"),
        (512, "raise it to at most 512, the limit of the model, or set"),
        (200, "this is the limit of the model: choose a model with a longer context, or set"),
    ],
)
def test_too_long_samples_name_the_limit_of_the_model(readable: int, remedy: str) -> None:
    [problem] = stop_reasons(config("a.jsonl"), SOURCE, LONG, partial(min, readable))
    assert problem == (
        "dataset.max_length=200: 6 of 100 samples of a.jsonl (6.0%) are longer (longest: 1,234 tokens, "
        f"first: a.jsonl:7); {remedy} dataset.on_overflow=truncate or drop"
    )


@given(st.lists(st.integers(1, 3_000_000), min_size=1, max_size=30))
def test_over_long_counted_in_classes(lengths: list[int]) -> None:
    """In classes narrow enough to say which dataset.max_length would keep them, and few enough to be kept."""
    counts = RowCounts()
    for length in lengths:
        counts.too_long(length)
    assert counts.over_long == sum(counts.over_long_up_to.values()) == len(lengths)
    for length in lengths:
        end = min(int(end) for end in counts.over_long_up_to if int(end) >= length)
        assert length <= end <= length + max(7, length / 32)
