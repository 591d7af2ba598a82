"""Columns of rows: those that hold several rows, those that are left out, and those that are not read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.assets import template_text
from app.config.kinds import fields_of
from app.data.columns import reshape_rows
from app.data.detect_format import detect_formats
from app.data.prepare import Data, prepare
from app.data.rows import Broken
from app.errors import DataError
from tests.data.small import chat, config, tokenizer, trained_texts, write_jsonl

EACH = {"input": "instances.*.input", "output": "instances.*.output"}


def parts(row: Any, **columns: str) -> list[Any]:
    rows: Iterator[Any] = iter([("a.jsonl:1", row)])
    return list(reshape_rows(rows, config("x", columns=columns), fields_of("instruction")))


def test_reshape_rows_nested_list_of_text() -> None:
    row = {"a": [0, {"b": ["x", "y"]}]}
    assert [found for _, found in parts(row, output="a.1.b.*")] == [
        {"a": [0, {"b": {"*": "x"}}]},
        {"a": [0, {"b": {"*": "y"}}]},
    ]


def test_reshape_rows_without_star_changes_nothing() -> None:
    row = {"text": "a", "instances": []}
    assert parts(row) == [("a.jsonl:1", row)]
    assert parts(row, text="instances.*") == [("a.jsonl:1", row)]  # a column that the format does not read


@pytest.mark.parametrize(
    ("row", "found"), [({"instances": []}, "an empty list"), ({"instances": "x"}, "text"), ({}, "nothing")]
)
def test_reshape_rows_no_list_is_bad_row(row: dict[str, Any], found: str) -> None:
    [(place, broken)] = parts(row, **EACH)
    assert (place, broken) == (
        "a.jsonl:1",
        Broken(f"column 'instances' must be a list, because dataset.columns has instances.*; found {found}"),
    )
    assert parts(Broken("torn"), **EACH) == [("a.jsonl:1", Broken("torn"))]


def test_reshape_rows_elements_have_locations_and_counts(tmp_path: Path) -> None:
    rows = [
        {"instruction": "add", "instances": [{"input": "1", "output": "one"}, {"input": "2", "output": True}]},
        {"instruction": "sub", "instances": [{"input": "", "output": "three"}]},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    settings = config(path, "instruction", columns=EACH, on_bad_row="skip")
    data = prepare(settings, tokenizer(), str(tmp_path / "cache"))
    made = tokenizer()
    assert [data.train.source_location(i) for i in range(2)] == ["a.jsonl:1 instances[0]", "a.jsonl:2 instances[0]"]
    assert trained_texts(made, data.train.ids(0), data.train.loss_mask(0)) == ["one<|im_end|>"]
    assert (data.report.train.rows_read, data.report.train.bad_rows) == (3, 1)
    with pytest.raises(DataError, match=r"a\.jsonl:1 instances\[1\]: column 'instances\.\*\.output' must be text"):
        prepare(config(path, "instruction", columns=EACH), tokenizer(), str(tmp_path / "cache"))


def prepared(path: Path, row: dict[str, Any], fmt: str, **changes: Any) -> Data:
    found, notes = detect_formats(config(write_jsonl(path / "a.jsonl", [row] * 2), fmt, **changes))
    return prepare(found, tokenizer(), str(path / "cache"), notes)


def test_unread_columns_and_keys_told(tmp_path: Path) -> None:
    talk = [{**chat("q")[0], "name": "x"}, {**chat("q", "a")[1], "thinking": "hm", "weight": 1, "training": True}]
    row = {"messages": talk, "functions": [], "id": None, "score": 3}
    for fmt in ("messages", "auto"):
        data = prepared(tmp_path, row, fmt)
        assert data.report.train.unread_columns == {"functions": 2, "score": 2}
        assert data.report.train.unread_keys == {"name": 2, "thinking": 2}
        assert data.report.lines()[3:5] == [
            "train: columns not read: functions (2 rows), score (2 rows)",
            "train: message keys not read: name (2 messages), thinking (2 messages)",
        ]
    held = write_jsonl(tmp_path / "held.jsonl", [{"messages": chat("q", "b"), "topic": "x"}])
    assert (
        "eval: columns not read: topic (1 row)" in prepared(tmp_path, row, "auto", eval_path=str(held)).report.lines()
    )


@pytest.mark.parametrize("key", ["thought", "text", "reasoning"])
def test_unread_key_named_like_a_word_of_the_template_reported(tmp_path: Path, key: str) -> None:
    made = tokenizer()
    made.chat_template = template_text("qwen2.5" if key == "reasoning" else "qwen3")
    made.chat_template = "{# writes no thinking #}" + made.chat_template
    talk = [*chat("q"), {**chat("q", "a")[1], key: "hm"}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": talk}] * 2)
    assert prepare(config(path), made, str(tmp_path / "cache")).report.train.unread_keys == {key: 2}


def test_unread_key_decided_where_its_message_is_the_last(tmp_path: Path) -> None:
    made = tokenizer()
    made.chat_template = template_text("qwen3")  # which drops the thoughts of earlier turns
    talk = chat("q", "a", "q", "b")
    rows = [{"messages": [talk[0], {**talk[1], "thinking": "hm"}, {**talk[2], "note": "x"}, talk[3]]}] * 2
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert prepare(config(path), made, str(tmp_path / "cache")).report.train.unread_keys == {"note": 2}


def test_unread_part_of_column_told(tmp_path: Path) -> None:
    row = {"instruction": "q", "instances": [{"input": "i", "output": "a"}, {"output": "b"}]}
    data = prepared(tmp_path, row, "instruction", columns={"output": "instances.*.output"})
    assert data.report.train.unread_columns == {"instances.*.input": 2}
    data = prepared(tmp_path, row, "instruction", columns={"output": "instances.0.output"})
    assert data.report.train.unread_columns == {"instances.0.input": 2, "instances.1": 2}
    dolly = {"instruction": "q", "context": "c", "response": "a", "category": "x"}
    data = prepared(tmp_path, dolly, "instruction", columns={"output": "response"})
    assert "train: columns not read: context (2 rows), category (2 rows)" in data.report.lines()


@pytest.mark.parametrize("key", ["train", "training", "loss", "weight", "loss_weight"])
def test_key_of_message_not_trained(tmp_path: Path, key: str) -> None:
    talk = [*chat("q", "first", "q"), {"role": "assistant", "content": "second"}]
    talk[1] = {**talk[1], key: 0.0 if "weight" in key else False}  # type: ignore[dict-item]
    data = prepared(tmp_path, {"messages": talk}, "messages")
    trained = tokenizer().decode(data.train.ids(0)[data.train.loss_mask(0)])
    assert "second" in trained
    assert "first" not in trained
    assert not data.report.train.unread_keys


@pytest.mark.parametrize("fmt", ["messages", "auto"])
def test_leave_out_columns_not_read_nor_refused(tmp_path: Path, fmt: str) -> None:
    row = {"chosen": chat("q", "a"), "rejected": chat("q", "b"), "images": ["1"], "system": "s", "score": 3}
    columns = {"messages": "chosen"}
    for left_out, problem in (([], "column 'images'"), (["images"], "column 'rejected' makes this preference data")):
        with pytest.raises(DataError, match=problem):
            prepared(tmp_path, row, fmt, columns=columns, leave_out=left_out)
    data = prepared(tmp_path, row, fmt, columns=columns, leave_out=["rejected", "images", "system"])
    assert tokenizer().decode(data.train.ids(0)).startswith("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na")
    assert data.report.train.unread_columns == {"score": 2}
    with pytest.raises(DataError, match="needs a column 'chosen'; columns found: system, score"):
        prepared(tmp_path, row, "messages", columns=columns, leave_out=["rejected", "images", "chosen"])
