"""Rows with a wanted and an unwanted answer: their shapes, what is trained of them, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.data.prepare import Data, prepare
from app.data.token_dataset import MismatchedRows
from app.errors import DataError
from app.tasks.preference import Comparisons, LabeledAnswers
from tests.data.small import chat, config, tokenizer, trained_texts, write_jsonl

QUESTION = [{"role": "user", "content": "Hi"}]
YES, NO = ({"role": "assistant", "content": text} for text in ("Hello", "No"))
END = "<|im_end|>"
SHARE_GPT = ({"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}, {"from": "gpt", "value": "No"})
HH = "\n\nHuman: Hi\n\nAssistant:"

# each says the same: Hi, then Hello or No
SHAPES: dict[str, dict[str, Any]] = {
    "messages": {"prompt": QUESTION, "chosen": [YES], "rejected": [NO]},
    "texts as a chat": {"prompt": "Hi", "chosen": "Hello", "rejected": "No"},
    "one message each": {"prompt": "Hi", "chosen": YES, "rejected": NO},
    "whole chats": {"chosen": [*QUESTION, YES], "rejected": [*QUESTION, NO]},
    "whole chats that repeat the prompt": {"prompt": "Hi", "chosen": [*QUESTION, YES], "rejected": [*QUESTION, NO]},
    "ShareGPT": {"prompt": [SHARE_GPT[0]], "chosen": SHARE_GPT[1], "rejected": SHARE_GPT[2]},
}
NAMED = {"prompt": "input.messages", "chosen": "preferred_output", "rejected": "non_preferred_output"}


def read(path: Path, fmt: str = "preference", **changes: Any) -> Data:
    return prepare(config(path, fmt, **changes), tokenizer(), str(path.parent / "cache"))


def sides(data: Data, row: int = 0) -> list[tuple[str, list[str]]]:
    """The text of both answers, and what is trained of it."""
    made = tokenizer()
    found = []
    for each in Comparisons().label(data.train, row, epoch=0):
        mask = np.zeros(len(each.ids), np.bool_)
        mask[each.at + 1] = True
        found.append((made.decode(each.ids), trained_texts(made, each.ids, mask)))
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_shape_gives_both_answers_in_the_template(shape: str, tmp_path: Path) -> None:
    data = read(write_jsonl(tmp_path / "a.jsonl", [SHAPES[shape]]))
    prompt = f"<|im_start|>user\nHi{END}\n<|im_start|>assistant\n"
    assert [(text.rstrip(), trained) for text, trained in sides(data)] == [
        (f"{prompt}Hello{END}", [f"Hello{END}"]),
        (f"{prompt}No{END}", [f"No{END}"]),
    ]


def test_columns_of_openai_are_read_by_their_paths(tmp_path: Path) -> None:
    row = {"input": {"messages": QUESTION}, "preferred_output": [YES], "non_preferred_output": [NO]}
    data = read(write_jsonl(tmp_path / "a.jsonl", [row]), columns=NAMED)
    assert [trained for _, trained in sides(data)] == [[f"Hello{END}"], [f"No{END}"]]


def test_answers_that_part_early_are_trained_from_there(tmp_path: Path) -> None:
    row = {"chosen": chat("Hi", "Hello", "Well", "Yes"), "rejected": chat("Hi", "No", "Well", "Oh")}
    data = read(write_jsonl(tmp_path / "a.jsonl", [row]))
    assert [trained for _, trained in sides(data)] == [[f"Hello{END}", f"Yes{END}"], [f"No{END}", f"Oh{END}"]]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": HH, "chosen": " Hello", "rejected": " No"},
        {"chosen": f"{HH} Hello", "rejected": f"{HH} No"},
        {"prompt": HH, "chosen": f"{HH} Hello", "rejected": f"{HH} No"},
    ],
)
def test_plain_texts_part_after_their_prompt(row: dict[str, str], tmp_path: Path) -> None:
    data = read(write_jsonl(tmp_path / "a.jsonl", [row]), "preference_text")
    assert sides(data) == [(f"{HH} Hello{END}", [f" Hello{END}"]), (f"{HH} No{END}", [f" No{END}"])]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"chosen": chat("Hi", "a"), "rejected": chat("Ho", "b")},
            "the chosen and rejected answers have different prompts",
        ),
        (
            {"chosen": chat("Hi", "a", system="s"), "rejected": chat("Ho", "b", system="s")},
            "the chosen and rejected answers have different prompts",
        ),
        ({"prompt": "Hi", "chosen": "", "rejected": "b"}, "column 'chosen' has an empty answer"),
        ({"prompt": "Hi", "chosen": "a"}, "dataset.format=preference needs a column 'rejected'"),
        ({"prompt": "Hi", "chosen": 3, "rejected": "b"}, "column 'chosen' must be a list of messages"),
        (
            {"chosen": [*chat("Hi", "a"), *QUESTION], "rejected": chat("Hi", "a")},
            "the chosen and rejected answers have different prompts",
        ),
        (
            {**SHAPES["messages"], "chosen": {**YES, "weight": 0.5}},
            "preference data supports only message weights of 0 and 1",
        ),
    ],
)
def test_row_that_compares_nothing_is_named(row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [SHAPES["messages"], row])
    with pytest.raises(DataError) as error:
        read(path)
    assert str(error.value).startswith(f"a.jsonl:2: {reason}")


def test_pairs_that_teach_nothing_are_dropped_and_counted(tmp_path: Path) -> None:
    long = {"prompt": "Hi", "chosen": "word " * 300, "rejected": "No"}
    rows = [*[SHAPES["messages"]] * 60, {"prompt": "Hi", "chosen": "a", "rejected": "a"}, long]
    data = read(write_jsonl(tmp_path / "a.jsonl", rows))
    assert (len(data.train), data.report.train.equal_answers, data.report.train.dropped) == (60, 1, 1)
    lines = "\n".join(data.report.lines())
    assert "train: 1 pair of identical answers dropped" in lines
    assert "train: 1 sample longer than dataset.max_length" in lines
    alike = {"prompt": "Hi", "chosen": "word " * 300 + "a", "rejected": "word " * 300 + "b"}
    cut = read(write_jsonl(tmp_path / "b.jsonl", [long, alike]), on_overflow="truncate")
    assert (len(cut.train), cut.report.train.equal_answers) == (1, 1)
    assert next(len(each.ids) for each in Comparisons().label(cut.train, 0, epoch=0)) == 200


def test_keys_of_messages_that_no_template_reads_are_told(tmp_path: Path) -> None:
    asked = [{**QUESTION[0], "mood": "x"}]
    row: dict[str, Any] = {"prompt": asked, "chosen": {**YES, "mood": "x"}, "rejected": NO}
    row["functions"] = [{"name": "rain"}]
    counts = read(write_jsonl(tmp_path / "a.jsonl", [row])).report.train
    assert (counts.unread_keys, counts.unread_columns) == ({"mood": 2}, {})
    row = {"prompt": asked, "completion": YES, "label": True, "chat_template_kwargs": {"mood": 1}}
    counts = read(write_jsonl(tmp_path / "b.jsonl", [row]), "preference_label").report.train
    assert (counts.unread_keys, counts.unread_columns) == ({"mood": 1}, {"chat_template_kwargs.mood": 1})


def test_answers_to_one_prompt_stay_in_one_split(tmp_path: Path) -> None:
    rows = [{"prompt": f"Hi {at % 20}", "chosen": f"yes {at}", "rejected": "no"} for at in range(200)]
    data = read(write_jsonl(tmp_path / "a.jsonl", rows), eval_fraction=0.3)
    assert data.eval is not None
    prompts = [
        {sides(replaced, i)[0][0].split(END)[0] for i in range(len(replaced.train))} for replaced in halves(data)
    ]
    assert all(prompts)
    assert not prompts[0] & prompts[1]


@pytest.mark.parametrize("fmt", ["preference_text", "preference_label_text"])
def test_answers_without_a_prompt_are_held_out_one_by_one(fmt: str, tmp_path: Path) -> None:
    names = ("chosen", "rejected") if fmt == "preference_text" else ("completion", "label")
    rows = [dict(zip(names, (f"yes {at}", "1"), strict=True)) for at in range(100)]
    data = read(write_jsonl(tmp_path / "a.jsonl", rows), fmt, eval_fraction=0.3)
    assert data.eval is not None
    assert 10 < len(data.eval) < 50


def halves(data: Data) -> list[Data]:
    assert data.eval is not None
    return [data, Data(data.eval, None, data.report)]


LABELED: dict[str, dict[str, Any]] = {
    "messages": {"prompt": QUESTION, "completion": [YES], "label": True},
    "texts as a chat": {"prompt": "Hi", "completion": "Hello", "label": "true"},
    "one message": {"prompt": "Hi", "completion": YES, "label": 1},
    "a whole chat": {"completion": [*QUESTION, YES], "label": True},
    "ShareGPT": {"prompt": [SHARE_GPT[0]], "completion": [SHARE_GPT[1]], "label": True},
}


@pytest.mark.parametrize("shape", LABELED)
def test_shape_gives_the_answer_with_its_label(shape: str, tmp_path: Path) -> None:
    rows = [LABELED[shape], {"prompt": "Hi", "completion": "Hello", "label": False}]
    data = read(write_jsonl(tmp_path / "a.jsonl", rows), "preference_label")
    for i in range(2):
        (answer,) = LabeledAnswers().label(data.train, i, epoch=0)
        mask = np.isin(np.arange(len(answer.ids)), answer.at + 1)
        assert trained_texts(tokenizer(), answer.ids, mask) == [f"Hello{END}"]
    assert [data.train.class_of(i) for i in range(2)] == ["true", "false"]
    assert len(np.unique(data.train.content_hashes)) == 2, "the label is part of a row"
    assert len(np.unique(data.train.split_hashes)) == 1, "answers to one prompt stay in one split"


def test_plain_text_with_a_label_parts_after_its_prompt(tmp_path: Path) -> None:
    rows = [{"completion": f"{HH} Hello", "label": True}, {"prompt": HH, "completion": " No", "label": False}]
    data = read(write_jsonl(tmp_path / "a.jsonl", rows), "preference_label_text")
    found = [LabeledAnswers().label(data.train, i, epoch=0)[0] for i in range(2)]
    assert [tokenizer().decode(each.targets) for each in found] == [f" Hello{END}", f" No{END}"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"prompt": "Hi", "completion": "a", "label": "good"},
            "column 'label' must be true (good answer) or false (bad answer), found",
        ),
        ({"prompt": "Hi", "completion": "a"}, "dataset.format=preference_label needs a column 'label'"),
        ({"prompt": "Hi", "completion": " ", "label": True}, "column 'completion' has an empty answer"),
        ({"completion": "a", "label": True}, "column 'completion' has no answer to a prompt"),
        (
            {"prompt": "Hi", "completion": {**YES, "weight": 2}, "label": True},
            "preference data supports only message weights",
        ),
        (SHAPES["messages"], "column 'rejected' makes this preference data"),
    ],
)
def test_answer_without_a_judgment_is_named(row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [LABELED["messages"], row])
    with pytest.raises(DataError) as error:
        read(path, "preference_label")
    assert str(error.value).startswith(f"a.jsonl:2: {reason}")


def test_held_out_answers_may_have_a_label_that_no_trained_one_has(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [LABELED["messages"]])
    other = write_jsonl(tmp_path / "b.jsonl", [{**LABELED["messages"], "label": False}])
    held_out = read(path, "preference_label", eval_path=str(other)).report.eval
    assert held_out is not None
    assert (held_out.classes, held_out.bad_rows) == ({"false": 1}, 0)


def test_mismatched_rows_have_the_answer_of_another_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": f"Hi {at}", "completion": f"a{at} " * (1 + at), "label": at % 2 == 0} for at in range(6)]
    data = read(write_jsonl(tmp_path / "a.jsonl", [*rows, rows[0]]), "preference_label")
    others = MismatchedRows(data.train)
    texts = [tokenizer().decode(others.ids(i)) for i in range(7)]
    assert texts[0] == texts[6], "equal rows have equal ones"
    assert sorted(text.split(END)[1].split()[-1][1:] for text in texts[:6]) == list("012345"), "each answer once"
    assert all(f"Hi {at}{END}" in text and f"a{at} " not in text for at, text in enumerate(texts[:6]))
    assert max(others.lengths) <= max(data.train.lengths)
    assert others.select([3]).ids(0).tolist() == others.ids(3).tolist()
