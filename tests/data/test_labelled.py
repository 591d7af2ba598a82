"""Rows with labels: what they mean, how they are framed and cut, and which labels there are."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from app.config.schema import TaskConfig
from app.data.collate import BinShape, collate_packed, collate_padded
from app.data.prepare import Data, prepare, rows_to_score
from app.data.row_pipeline import POLICIES
from app.data.rows import RenderedText
from app.data.token_dataset import in_order
from app.data.tokenizer import Encoder
from app.errors import DataError
from app.tasks.table import build_objective
from tests.data.small import config, tokenizer, write_jsonl

WORDS = st.lists(st.sampled_from(["rain", "cat", "the capital", "fifteen"]), min_size=1, max_size=12)


def framing() -> Any:
    """As BERT's: both texts framed, with token types."""
    made = tokenizer(None)
    made.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]"})
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", made.cls_token_id), ("[SEP]", made.sep_token_id)],
    )
    made.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return made


def read(path: Path, fmt: str = "labelled_text", labels: tuple[str, ...] = (), **changes: Any) -> Data:
    return prepare(config(path, fmt, **changes), tokenizer(None), str(path.parent / "cache"), classes=labels)


def labeled(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"text": text, "label": label} for text, label in pairs]


def reason(tmp_path: Path, label: Any) -> str:
    with pytest.raises(DataError) as found:
        read(write_jsonl(tmp_path / "a.jsonl", labeled(("rain", label))))
    return found.value.problems[0]


def test_labels_equal_in_all_file_kinds(tmp_path: Path) -> None:
    rows = labeled(("rain", 10), ("cat", 9), ("two", "2"), ("one", 9))
    as_json = read(write_jsonl(tmp_path / "a.jsonl", rows))
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label"])
        writer.writeheader()
        writer.writerows(rows)
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"text": [r["text"] for r in rows], "label": [int(r["label"]) for r in rows]})
    pq.write_table(table, tmp_path / "a.parquet")
    for data in (as_json, read(tmp_path / "a.csv"), read(tmp_path / "a.parquet")):
        assert data.classes == ("2", "9", "10"), "numbers by size"
        assert data.report.train.classes == {"2": 1, "9": 2, "10": 1}
        assert [data.train.class_of(i) for i in range(4)] == ["10", "9", "2", "9"]
        assert data.train.num_trained == data.report.train.trained_tokens == 4
    assert read(write_jsonl(tmp_path / "b.jsonl", labeled(("a", True), ("b", False)))).classes == ("false", "true")
    assert in_order({"b", "a", "B", "10"}) == ["10", "B", "a", "b"]


def test_labels_that_differ_as_files_write_true_are_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", labeled(("rain", True), ("cat", False)))
    (tmp_path / "b.csv").write_text("text,label\ntwo,True\n")
    with pytest.raises(DataError, match=r"^dataset\.path=.*: the labels True and true would be two classes\."):
        read(tmp_path)


@pytest.mark.parametrize(
    ("label", "why"),
    [
        (0.5, "column 'label' is 0.5, but a label must be a word or an integer: set task.problem=regression"),
        ("4.5", "column 'label' is 4.5, but a label must be a word or an integer"),
        (4.0, "or 4 instead of 4.0"),
        (["a", "b"], "column 'label' must be a label (a word or an integer), found a list"),
        (None, "column 'label' must be a label (a word or an integer), found null"),
        ("", "found empty"),
        ("x" * 201, "has 201 characters: this is a text, not a label"),
    ],
)
def test_label_unusable_is_bad_row(tmp_path: Path, label: Any, why: str) -> None:
    problem = reason(tmp_path, label)
    assert problem.startswith("a.jsonl:1: ")
    assert why in problem


def test_pair_encoded_as_tokenizer_does(tmp_path: Path) -> None:
    made = framing()
    rows = [{"sentence1": "rain on the roof", "sentence2": "the cat sleeps", "label": "yes"}]
    rows.append({"sentence1": "two", "sentence2": "four five six", "label": "no"})
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    data = prepare(config(path, "text_pair"), made, str(tmp_path / "cache"))
    labels = build_objective(TaskConfig(kind="classification", labels=["yes", "no"]), made, 0, bidirectional=True)
    found = [labels.label(data.train, i, 0)[0] for i in range(2)]
    for row, each in zip(rows, found, strict=True):
        expected = made(row["sentence1"], row["sentence2"])
        assert each.ids.tolist() == expected.input_ids
        assert (np.arange(len(each.ids)) >= each.second_start).astype(int).tolist() == expected.token_type_ids
    assert [each.targets.tolist() for each in found] == [[0], [1]]
    assert [each.at.tolist() for each in found] == [[0], [0]]

    one, two = (len(each.ids) for each in found)
    packed = collate_packed(found, 0, BinShape(one + two + 5, one + two, 4))
    padded = collate_padded(found, 0)
    assert packed.token_type_ids is not None
    assert padded.token_type_ids is not None
    sides = [[0] * each.second_start + [1] * (len(each.ids) - each.second_start) for each in found]
    assert packed.token_type_ids[0].tolist() == [*sides[0], *sides[1], *[0] * 5]
    assert [row[: len(side)] for row, side in zip(padded.token_type_ids.tolist(), sides, strict=True)] == sides
    assert sum(sum(row) for row in padded.token_type_ids.tolist()) == sum(map(sum, sides)), "padding has no side"


def test_classification_causal_uses_last_real_token(tmp_path: Path) -> None:
    made = tokenizer(None)
    path = write_jsonl(tmp_path / "a.jsonl", labeled(("rain on the roof", "a"), ("rain<pad><pad>", "b")))
    data = prepare(config(path, "labelled_text"), made, str(tmp_path / "cache"))
    labels = build_objective(TaskConfig(kind="classification", labels=["a", "b"]), made, 0, bidirectional=False)
    first, second = (labels.label(data.train, i, 0)[0] for i in range(2))
    assert first.at.tolist() == [len(first.ids) - 1]
    assert second.at.tolist() == [len(second.ids) - 3]
    assert collate_padded([first, second], 0).token_type_ids is None


@settings(deadline=None, max_examples=60)
@given(first=WORDS, second=st.none() | WORDS, room=st.integers(4, 30))
def test_truncate_example_equals_transformers(first: list[str], second: list[str] | None, room: int) -> None:
    made, texts = framing(), [" ".join(first), *([" ".join(second)] if second else [])]
    rendered = RenderedText(texts[0], (), raw=True, label="a", second=texts[1] if second else None)
    (sample,) = Encoder(made).encode([rendered])
    if len(sample.ids) <= room:
        return
    (cut,) = POLICIES["truncate"](sample, room)
    expected = made(*texts, truncation=True, max_length=room)
    assert cut.ids.tolist() == expected.input_ids
    if second:
        assert (np.arange(len(cut.ids)) >= cut.second_start).astype(int).tolist() == expected.token_type_ids


def test_labelled_long_text_truncated_and_counted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", labeled(("rain " * 80, "a"), ("cat", "b")))
    data = read(path, max_length=20)
    assert (data.report.train.truncated, data.report.train.dropped, len(data.train)) == (1, 0, 2)
    assert data.train.lengths.tolist()[0] == 20


def test_labels_from_rows_or_given(tmp_path: Path) -> None:
    rows = [("rain", "b"), ("cat", "a"), ("roof", "c")]
    path = write_jsonl(tmp_path / "a.jsonl", labeled(*rows))
    held = write_jsonl(tmp_path / "held.jsonl", labeled(("x", "a"), ("y", "z")))
    assert read(path).classes == ("a", "b", "c")
    assert read(path, labels=("c", "b", "a")).classes == ("c", "b", "a")
    with pytest.raises(DataError, match=r"a\.jsonl:3: unknown label 'c'; labels: a, b"):
        read(path, labels=("a", "b"))
    with pytest.raises(DataError, match=r"held\.jsonl:2: unknown label 'z'; labels: a, b, c"):
        read(path, eval_path=str(held))
    data = read(path, eval_path=str(held), on_bad_row="skip")
    assert data.eval is not None
    assert data.report.eval is not None
    assert (len(data.eval), data.report.eval.bad_rows, data.report.eval.classes) == (1, 1, {"a": 1})
    skipping = config(held, "labelled_text", on_bad_row="skip")
    scored = rows_to_score(skipping, tokenizer(None), str(tmp_path / "cache"), classes=("a",))
    assert scored.eval is not None
    assert scored.report.eval is not None
    assert (len(scored.eval), scored.report.eval.bad_rows) == (1, 1)
    split = read(
        write_jsonl(tmp_path / "many.jsonl", labeled(*((f"t {i}", i % 3) for i in range(60)))), eval_fraction=0.3
    )
    assert split.report.eval is not None
    assert sum(split.report.train.classes.values()) + sum(split.report.eval.classes.values()) == 60


def test_same_text_other_label_is_no_duplicate(tmp_path: Path) -> None:
    rows = labeled(("rain", "a"), ("rain", "b"), ("cat", "a"), ("cat", "a"))
    data = read(write_jsonl(tmp_path / "a.jsonl", rows), deduplicate=True)
    assert data.report.train.duplicates_dropped == 1
    assert len(data.train) == 3
    assert any("texts with more than one label: 1" in note for note in data.report.notes)


def test_mix_has_labels_of_all_sources(tmp_path: Path) -> None:
    from app.config.schema import MixSource

    one = write_jsonl(tmp_path / "a.jsonl", labeled(("rain", "b"), ("cat", "a")))
    two = tmp_path / "b.jsonl"
    two.write_text(json.dumps({"said": "roof", "label": "c"}) + "\n")
    mix = {"x": MixSource(path=str(one)), "y": MixSource(path=str(two), columns={"text": "said"}, weight=2.0)}
    section = config(one, "labelled_text")
    section.path, section.mix = None, mix
    data = prepare(section, tokenizer(None), str(tmp_path / "cache"))
    assert data.classes == ("a", "b", "c")
    assert [data.train.class_of(i) for i in range(4)] == ["b", "a", "c", "c"]
    assert data.report.train.classes == {"a": 1, "b": 1, "c": 2}


def test_pair_without_separator_noted(tmp_path: Path) -> None:
    rows = [{"sentence1": "rain", "sentence2": "cat", "label": at} for at in range(2)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    plain = prepare(config(path, "text_pair"), tokenizer(None), str(tmp_path / "cache"))
    framed = prepare(config(path, "text_pair"), framing(), str(tmp_path / "cache"))
    expected = "adds no separator between the two texts of a pair"
    assert any(expected in note for note in plain.report.notes)
    assert not any(expected in note for note in framed.report.notes)
    assert plain.train.second_start(0) == -1
