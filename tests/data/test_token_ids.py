"""Rows of token IDs: trained unchanged, as the rows of text from which they were made."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.config.schema import MixSource
from app.data.detect_format import detect_formats
from app.data.prepare import Data, prepare
from app.errors import DataError
from tests.data.small import chat, config, greetings, locations, tokenizer, write_chats, write_jsonl

IDS = [40, 41, 42, 43, 44, 45]


def read(folder: Path, *rows: dict[str, Any], **changes: Any) -> Data:
    path = write_jsonl(folder / "a.jsonl", rows)
    return prepare(config(path, "token_ids", **changes), tokenizer(None), str(folder / "cache"))


def as_token_ids(data: Data, padding: int = 0) -> list[dict[str, list[int]]]:
    """The training rows as another program would store them, padded to the right by so many tokens for each row."""
    rows = []
    for i in range(len(data.train)):
        ids, mask, pad = data.train.ids(i), data.train.loss_mask(i), padding * i
        labels = [*np.where(mask, ids, -100).tolist(), *[-100] * pad]
        rows.append(
            {
                "input_ids": [*ids.tolist(), *[0] * pad],
                "labels": labels,
                "attention_mask": [*[1] * len(ids), *[0] * pad],
            }
        )
    return rows


@pytest.fixture
def chats(tmp_path: Path) -> Data:
    path = write_chats(tmp_path / "chats.jsonl", *greetings(5), chat("a", "b", "c", "d", system="Be brief."))
    return prepare(config(path), tokenizer(), str(tmp_path / "cache"))


def test_token_ids_equal_the_rows_of_messages_they_were_made_from(chats: Data, tmp_path: Path) -> None:
    rows = as_token_ids(chats, padding=2)
    data = read(tmp_path, *rows)
    assert data.train.fingerprint == chats.train.fingerprint
    assert locations(data.train) == [f"a.jsonl:{n}" for n in range(1, 7)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    section, [note] = detect_formats(config(tmp_path / "a.parquet", "auto"))
    assert (
        "dataset.format=token_ids: found lists of token ids in input_ids in 6 of 6 rows; also read: labels, att" in note
    )
    table = prepare(section, tokenizer(None), str(tmp_path / "cache"))
    assert table.train.fingerprint == chats.train.fingerprint


def test_token_ids_without_labels_all_trained_and_nothing_added(tmp_path: Path) -> None:
    for changes in ({}, {"columns": {"labels": None}}):
        data = read(tmp_path, {"input_ids": IDS, **({"labels": [-100] * 6} if changes else {})}, **changes)
        assert data.train.ids(0).tolist() == IDS
        assert data.train.loss_mask(0).tolist() == [False, *[True] * 5]
        assert data.report.train.endless == 0


def test_token_ids_answer_without_end_token_counted(tmp_path: Path) -> None:
    data = read(tmp_path, {"input_ids": IDS, "labels": [-100, -100, 42, 43, -100, -100]})
    assert data.train.loss_mask(0).tolist() == [False, False, True, True, False, False]
    assert data.report.train.endless == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"labels": [*IDS[:5], 7]}, "the label at index 5 is 7, expected -100 or the token ID there, 45; fix the row"),
        (
            {"labels": [*IDS[1:], -100]},
            "the label at index 0 is 41, expected -100 or the token ID there, 40; align them",
        ),
        ({"labels": IDS[:5]}, "column 'labels' has 5 values, but 'input_ids' 6"),
        ({"labels": [-100] * 6}, "it has no trained tokens"),
        (
            {"labels": IDS, "attention_mask": [1] * 5 + [0]},
            "the label at index 5 is 45, but 'attention_mask' is 0 there",
        ),
        ({"attention_mask": [1, 1, 0, 1, 1, 1]}, "column 'attention_mask' is 0 at index 2, between tokens"),
        ({"attention_mask": [0] * 6}, "column 'attention_mask' is 0 for all tokens"),
        ({"attention_mask": [2] * 6}, "column 'attention_mask' must have only 0 and 1"),
        ({"input_ids": [40, 400]}, "token ID 400 is not in the tokenizer (0 to 396)"),
        ({"input_ids": [40, -1]}, "token ID -1 is not in the tokenizer"),
        ({"input_ids": [40, 10**30]}, "has a number that is too large for a token ID"),
        ({"input_ids": [40, 4.0]}, "must be a list of integers, found a number at index 1"),
        ({"input_ids": [40, True]}, "must be a list of integers, found true or false at index 1"),
        ({"input_ids": []}, "column 'input_ids' is empty"),
        ({"input_ids": "40 41"}, "must be a list of integers, found text"),
    ],
)
def test_token_ids_that_do_not_fit_are_a_bad_row(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    rows = {"input_ids": IDS}, {"input_ids": IDS, **row}
    with pytest.raises(DataError) as error:
        read(tmp_path, *rows)
    assert error.value.problems[0].startswith("a.jsonl:2: ")
    assert message in error.value.problems[0]
    data = read(tmp_path, *rows, on_bad_row="skip")
    assert (data.report.train.bad_rows, len(data.train)) == (1, 1)


def test_token_ids_padding_at_both_ends_removed(tmp_path: Path) -> None:
    row = {"input_ids": [0, 0, *IDS, 0], "attention_mask": [0, 0, *[1] * 6, 0]}
    assert read(tmp_path, row).train.ids(0).tolist() == IDS


def test_token_ids_over_length_counted_by_the_policy(tmp_path: Path) -> None:
    rows = [{"input_ids": IDS * 2, "labels": IDS * 2}, {"input_ids": IDS, "labels": IDS}]
    cut = read(tmp_path, *rows, max_length=8, on_overflow="truncate")
    assert cut.train.lengths.tolist() == [8, 6]
    assert (cut.report.train.truncated, cut.report.train.tokens_lost) == (1, 4)
    dropped = read(tmp_path, *rows, max_length=8, on_overflow="drop")
    assert (len(dropped.train), dropped.report.train.dropped, dropped.report.train.rows_lost) == (1, 1, 1)


def test_token_ids_as_source_of_a_mix_and_as_eval_set(chats: Data, tmp_path: Path) -> None:
    tokens = write_jsonl(tmp_path / "tokens.jsonl", as_token_ids(chats))
    mix = {
        "ids": MixSource(path=str(tokens), format="token_ids", weight=2.0),
        "chat": MixSource(path=str(write_chats(tmp_path / "more.jsonl", *greetings(3, start=50)))),
    }
    data = prepare(replace(config("unused"), path=None, mix=mix), tokenizer(), str(tmp_path / "cache"))
    assert {name: share.drawn for name, share in data.report.shares.items()} == {"ids": 12, "chat": 3}
    held = prepare(config(tokens, "token_ids", eval_path=str(tokens)), tokenizer(), str(tmp_path / "cache"))
    assert held.eval is not None
    assert held.eval.fingerprint == held.train.fingerprint


def test_token_ids_refused_for_other_tasks(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": IDS}])
    with pytest.raises(DataError, match=r"Rows of token ids \(input_ids\) need task=causal"):
        detect_formats(config(path, "auto"), ("text",))
