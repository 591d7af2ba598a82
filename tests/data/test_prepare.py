"""The two splits, and their report."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from app.data.prepare import Data, prepare, rows_to_score
from app.data.token_dataset import TokenRows
from app.errors import ConfigError, DataError
from tests.data.small import chat, config, greetings, locations, tokenizer, write_chats


def read(path: Path | str, fmt: str = "messages", kind: str | None = "chatml", **changes: Any) -> Data:
    return prepare(config(path, fmt, **changes), tokenizer(kind), str(Path(path).parent / "cache"))


def test_eval_path_rows(tmp_path: Path) -> None:
    held = write_chats(tmp_path / "held.jsonl", *greetings(3, start=3))
    data = read(write_chats(tmp_path / "a.jsonl", *greetings(4)), eval_path=str(held), eval_fraction=0.5)
    assert len(data.train) == 4
    assert locations(data.eval) == [f"held.jsonl:{n}" for n in (1, 2, 3)]
    assert data.report.shared == 1
    assert "eval: 1 sample also in the training set: eval_loss is too low" in data.report.lines()


def test_eval_fraction_held_out(tmp_path: Path) -> None:
    data = read(write_chats(tmp_path / "a.jsonl", *greetings(200)), eval_fraction=0.25)
    assert data.eval is not None
    assert 25 < len(data.eval) < 75
    assert sorted(locations(data.train) + locations(data.eval)) == sorted(f"a.jsonl:{n}" for n in range(1, 201))
    assert data.report.train.held_out == len(data.eval)
    for rows, counts in ((data.train, data.report.train), (data.eval, data.report.eval)):
        assert counts is not None
        assert counts.samples == len(rows)
        assert counts.tokens == rows.lengths.sum()
        assert counts.trained_tokens == sum(rows.loss_mask(i).sum() for i in range(len(rows)))


def test_eval_fraction_row_stays_in_its_split(tmp_path: Path) -> None:
    def held(count: int, start: int, **changes: Any) -> set[str]:
        path = write_chats(tmp_path / f"{count}-{start}.jsonl", *greetings(count, start))
        data = read(path, eval_fraction=0.25, **changes)
        assert data.eval is not None
        return {tokenizer().decode(data.eval.ids(i)) for i in range(len(data.eval))}

    all_of_them = held(200, 0)
    assert held(100, 0) | held(100, 100) == all_of_them
    assert held(200, 0, max_length=150) == all_of_them


def test_eval_fraction_equal_rows_together(tmp_path: Path) -> None:
    data = read(write_chats(tmp_path / "a.jsonl", *greetings(40), *greetings(40)), eval_fraction=0.5)
    assert data.eval is not None
    assert not set(data.train.ids_hashes.tolist()) & set(data.eval.ids_hashes.tolist())


def test_eval_fraction_conversation_together(tmp_path: Path) -> None:
    thought = [chat("Hi", f"<think>hm</think>Hello {n}", "And?", "<think>oh</think>Bye") for n in range(40)]
    data = read(write_chats(tmp_path / "a.jsonl", *thought), kind="thinking", eval_fraction=0.5)
    assert len(data.train) + len(data.eval or ()) == 80
    assert not set(locations(data.train)) & set(locations(data.eval))


def test_eval_fraction_parts_of_long_text(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(" ".join(f"line {n} of the book" for n in range(400)))
    data = read(tmp_path / "book.txt", "text", kind=None, max_length=32, eval_fraction=0.3)
    assert data.eval is not None
    assert len(data.eval) > 10


@pytest.mark.parametrize(
    ("rows", "fraction", "remedy"),
    [
        (2, 0.001, "eval_path=FILE"),
        (2, 0, "eval_path=FILE"),
        (40, 0, "eval_fraction=0.2"),
        (400, 0, "eval_fraction=0.08"),
    ],
)
def test_nothing_held_out_told_with_remedy(tmp_path: Path, rows: int, fraction: float, remedy: str) -> None:
    data = read(write_chats(tmp_path / "a.jsonl", *greetings(rows)), eval_fraction=fraction)
    assert (data.eval, data.report.eval) == (None, None)
    assert f"eval: no eval set: overfitting would go unnoticed; set dataset.{remedy}" in data.report.lines()


def test_eval_fraction_of_all_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"dataset\.eval_fraction=0\.999 leaves none of 2 samples for training"):
        read(write_chats(tmp_path / "a.jsonl", *greetings(2)), eval_fraction=0.999)


def test_max_rows_of_train_and_eval(tmp_path: Path) -> None:
    held = write_chats(tmp_path / "held.jsonl", *greetings(9, start=50))
    data = read(write_chats(tmp_path / "a.jsonl", *greetings(9)), max_rows=3, eval_path=str(held), eval_max_rows=2)
    assert locations(data.train) == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"]
    assert locations(data.eval) == ["held.jsonl:1", "held.jsonl:2"]
    assert data.report.train.rows_read == 3


def test_eval_max_rows_of_fraction(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "a.jsonl", *greetings(100))
    everything = read(path, eval_fraction=0.5)
    data = read(path, eval_fraction=0.5, eval_max_rows=4)
    assert locations(data.eval) == locations(everything.eval)[:4]
    assert locations(data.train) == locations(everything.train)  # what is not scored is still not trained on
    assert data.report.eval is not None
    assert data.report.eval.left_over == len(everything.eval or ()) - 4


def test_report_as_dict_and_lines(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "a.jsonl", *greetings(100), chat("Hi", "x" * 999))
    data = read(path, eval_fraction=0.3)
    assert json.loads(json.dumps(asdict(data.report)))["train"]["dropped"] == 1
    train, long, held = data.report.lines()
    assert train.startswith("train: 101 rows -> ")
    assert long == ("train: 1 sample longer than dataset.max_length (longest: 1,013): 1 dropped; 1,013 tokens lost")
    assert held.startswith("eval: ")


def test_template_with_date_noted(tmp_path: Path) -> None:
    made = tokenizer()
    made.chat_template = "{{ strftime_now('%d %b %Y') }}\n" + made.chat_template
    path = write_chats(tmp_path / "a.jsonl", *greetings(2))
    data = prepare(config(path), made, str(tmp_path / "cache"))
    assert data.report.lines()[-1].startswith("the chat template writes the current date")
    assert not read(path).report.notes


def test_markers_that_are_no_tokens_noted(tmp_path: Path) -> None:
    made = tokenizer()
    made.chat_template = made.chat_template.replace("<|im_end|>", "<|stop|>")
    data = prepare(config(write_chats(tmp_path / "a.jsonl", *greetings(2))), made, str(tmp_path / "cache"))
    [note] = data.report.notes
    assert note.startswith("the chat template writes <|stop|>, which are not tokens of this tokenizer: the model reads")
    assert note.endswith("choose a model of the same family, or set model.chat_template=chatml")


def test_instruction_without_template_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("instruction,input,output\nadd,1 and 2,3\n")
    made = tokenizer()
    data = read(path, "instruction")
    assert made.decode(data.train.ids(0)) == (
        "<|im_start|>user\nadd\n\n1 and 2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
    )
    assert data.train.source_location(0) == "a.csv:2"
    with pytest.raises(ConfigError, match=r"model\.chat_template"):
        read(path, "instruction", kind=None)


def scored(path: Path | str, **changes: Any) -> tuple[TokenRows, int]:
    data = rows_to_score(config(path, **changes), tokenizer(), str(Path(path).parent / "cache"))
    assert data.eval is not None
    assert data.report.eval is not None
    assert (data.report.eval.samples, len(data.train), data.report.notes) == (len(data.eval), 0, [])
    return data.eval, data.report.eval.left_over


def test_rows_to_score_equal_held_out(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "a.jsonl", *greetings(100))
    held = write_chats(tmp_path / "held.jsonl", *greetings(5, start=200))
    ways: list[dict[str, Any]] = [
        {"eval_fraction": 0.25},
        {"eval_fraction": 0.25, "max_rows": 60, "eval_max_rows": 7},
        {"eval_path": str(held), "eval_max_rows": 3},
    ]
    for way in ways:
        data = read(path, **way)
        assert data.eval is not None
        assert scored(path, **way)[0].fingerprint == data.eval.fingerprint
    # the rows that are trained on need not be there
    path.unlink()
    assert locations(scored(path, eval_path=str(held))[0]) == [f"held.jsonl:{n}" for n in range(1, 6)]


def test_rows_to_score_all_without_eval(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "a.jsonl", *greetings(9))
    assert (len(scored(path)[0]), scored(path)[1]) == (9, 0)
    for limits in ({"max_rows": 4}, {"eval_max_rows": 4}, {"max_rows": 4, "eval_max_rows": 6}):
        assert len(scored(path, **limits)[0]) == 4


def test_rows_to_score_empty_fraction_refused(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "a.jsonl", *greetings(3))
    with pytest.raises(DataError, match=r"dataset\.eval_fraction=1e-09 of 3 samples is empty"):
        scored(path, eval_fraction=1e-9)
