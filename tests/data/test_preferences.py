"""Rows with a wanted and an unwanted answer: their shapes, what is trained of them, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.config.dataset import formats_for
from app.data.detect_format import detect_formats
from app.data.objectives import Comparisons
from app.data.prepare import Data, prepare
from app.errors import DataError
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
        ({"chosen": chat("Hi", "a"), "rejected": chat("Ho", "b")}, "the two answers follow different conversations"),
        ({"prompt": "Hi", "chosen": "", "rejected": "b"}, "column 'chosen' has an empty answer"),
        ({"prompt": "Hi", "chosen": "a"}, "dataset.format=preference needs a column 'rejected'"),
        ({"prompt": "Hi", "chosen": 3, "rejected": "b"}, "column 'chosen' must be a list of messages"),
        (
            {"chosen": [*chat("Hi", "a"), *QUESTION], "rejected": chat("Hi", "a")},
            "the two answers follow different conversations",
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
    assert "train: 1 pair of equal answers dropped" in lines
    assert "train: 1 sample longer than dataset.max_length" in lines
    cut = read(write_jsonl(tmp_path / "b.jsonl", [long]), on_overflow="truncate")
    assert next(len(each.ids) for each in Comparisons().label(cut.train, 0, epoch=0)) == 200


def test_answers_to_one_prompt_stay_in_one_split(tmp_path: Path) -> None:
    rows = [{"prompt": f"Hi {at % 20}", "chosen": f"yes {at}", "rejected": "no"} for at in range(200)]
    data = read(write_jsonl(tmp_path / "a.jsonl", rows), eval_fraction=0.3)
    assert data.eval is not None
    prompts = [
        {sides(replaced, i)[0][0].split(END)[0] for i in range(len(replaced.train))} for replaced in halves(data)
    ]
    assert all(prompts)
    assert not prompts[0] & prompts[1]


def halves(data: Data) -> list[Data]:
    assert data.eval is not None
    return [data, Data(data.eval, None, data.report)]


@pytest.mark.parametrize(
    ("row", "fmt"),
    [
        (SHAPES["messages"], "preference"),
        (SHAPES["whole chats"], "preference"),
        (SHAPES["one message each"], "preference"),
        (SHAPES["texts as a chat"], "preference_text"),
    ],
)
def test_auto_finds_the_format_of_pairs(row: dict[str, Any], fmt: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [row] * 3)
    found, _ = detect_formats(config(path, "auto"), formats_for("preference"))
    assert found.format == fmt
    with pytest.raises(DataError, match="from which recipe=dpo"):
        detect_formats(config(path, "auto"), formats_for("causal"))
