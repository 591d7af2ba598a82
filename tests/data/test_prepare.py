"""The two splits, and what is told about them."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.data.prepare import Data, prepare, rows_to_score
from app.data.token_dataset import TokenRows
from app.errors import ConfigError, DataError
from tests.data.small import chat, config, greetings, locations, tokenizer, write_chats


def read(path: Path | str, fmt: str = "messages", kind: str | None = "chatml", **changes: Any) -> Data:
    return prepare(config(path, fmt, **changes), tokenizer(kind), str(Path(path).parent / "cache"))


def test_nothing_is_held_out_unless_asked(tmp_path: Path) -> None:
    data = read(write_chats(tmp_path / "a.jsonl", *greetings(4)))
    assert len(data.train) == 4
    assert data.eval is None
    assert data.report.eval is None


def test_rows_of_a_file_of_their_own(tmp_path: Path) -> None:
    held = write_chats(tmp_path / "held.jsonl", *greetings(3, start=3))
    data = read(write_chats(tmp_path / "a.jsonl", *greetings(4)), eval_path=str(held), eval_fraction=0.5)
    assert len(data.train) == 4
    assert locations(data.eval) == [f"held.jsonl:{n}" for n in (1, 2, 3)]
    assert data.report.shared == 1
    assert "eval: 1 sample of it also trained on: eval_loss is too good" in data.report.lines()


def test_a_fraction_is_held_out(tmp_path: Path) -> None:
    data = read(write_chats(tmp_path / "a.jsonl", *greetings(200)), eval_fraction=0.25)
    assert data.eval is not None
    assert 25 < len(data.eval) < 75
    assert sorted(locations(data.train) + locations(data.eval)) == sorted(
        f"a.jsonl:{n}" for n in range(1, 201)
    )
    assert data.report.train.held_out == len(data.eval)
    for rows, counts in ((data.train, data.report.train), (data.eval, data.report.eval)):
        assert counts is not None
        assert counts.samples == len(rows)
        assert counts.tokens == rows.lengths.sum()
        assert counts.trained_tokens == sum(rows.loss_mask(i).sum() for i in range(len(rows)))


def test_a_row_keeps_its_side_when_others_come_and_lengths_change(tmp_path: Path) -> None:
    def held(count: int, start: int, **changes: Any) -> set[str]:
        path = write_chats(tmp_path / f"{count}-{start}.jsonl", *greetings(count, start))
        data = read(path, eval_fraction=0.25, **changes)
        assert data.eval is not None
        return {tokenizer().decode(data.eval.ids(i)) for i in range(len(data.eval))}

    all_of_them = held(200, 0)
    assert held(100, 0) | held(100, 100) == all_of_them
    assert held(200, 0, max_length=150) == all_of_them


def test_equal_rows_take_the_same_side(tmp_path: Path) -> None:
    data = read(write_chats(tmp_path / "a.jsonl", *greetings(40), *greetings(40)), eval_fraction=0.5)
    assert data.eval is not None
    assert not set(data.train.ids_hashes.tolist()) & set(data.eval.ids_hashes.tolist())


def test_samples_of_one_conversation_take_the_same_side(tmp_path: Path) -> None:
    thought = [chat("Hi", f"<think>hm</think>Hello {n}", "And?", "<think>oh</think>Bye") for n in range(40)]
    data = read(write_chats(tmp_path / "a.jsonl", *thought), kind="thinking", eval_fraction=0.5)
    assert len(data.train) + len(data.eval or ()) == 80
    assert not set(locations(data.train)) & set(locations(data.eval))


def test_one_long_text_can_be_held_out_in_part(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(" ".join(f"line {n} of the book" for n in range(400)))
    data = read(tmp_path / "book.txt", "text", kind=None, max_length=32, eval_fraction=0.3)
    assert data.eval is not None
    assert len(data.eval) > 10


def test_a_set_too_small_to_hold_out_of(tmp_path: Path) -> None:
    data = read(write_chats(tmp_path / "a.jsonl", *greetings(2)), eval_fraction=0.001)
    assert data.eval is None
    assert data.report.lines()[-1] == (
        "eval: dataset.eval_fraction=0.001 of 2 samples holds none out; there is no evaluation"
    )


def test_a_fraction_that_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"dataset\.eval_fraction=0\.999 leaves none of 2 samples to train on"
    ):
        read(write_chats(tmp_path / "a.jsonl", *greetings(2)), eval_fraction=0.999)


def test_the_first_rows_only(tmp_path: Path) -> None:
    held = write_chats(tmp_path / "held.jsonl", *greetings(9, start=50))
    data = read(
        write_chats(tmp_path / "a.jsonl", *greetings(9)), max_rows=3, eval_path=str(held), eval_max_rows=2
    )
    assert locations(data.train) == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"]
    assert locations(data.eval) == ["held.jsonl:1", "held.jsonl:2"]
    assert data.report.train.rows_read == 3


def test_a_fraction_of_which_only_the_first_are_scored(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "a.jsonl", *greetings(100))
    everything = read(path, eval_fraction=0.5)
    data = read(path, eval_fraction=0.5, eval_max_rows=4)
    assert locations(data.eval) == locations(everything.eval)[:4]
    assert locations(data.train) == locations(everything.train)  # what is not scored is still not trained on
    assert data.report.eval is not None
    assert data.report.eval.left_over == len(everything.eval or ()) - 4


def test_max_rows_holds_for_pieces_of_text_too(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Rain falls on the roof. " * 90)
    data = read(tmp_path / "book.txt", "text", kind=None, max_length=32, max_rows=4)
    assert len(data.train) == 4
    assert data.report.train.samples == 4
    assert data.report.train.left_over == data.report.train.pieces - 4


def test_the_report_fits_a_manifest_and_a_screen(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "a.jsonl", *greetings(100), chat("Hi", "x" * 999))
    data = read(path, eval_fraction=0.3)
    assert json.loads(json.dumps(data.report.as_dict()))["train"]["dropped"] == 1
    train, long, held = data.report.lines()
    assert train.startswith("train: 101 rows -> ")
    assert long == (
        "train: 1 sample longer than dataset.max_length (the longest 1,013): 1 dropped; 1,013 tokens lost"
    )
    assert held.startswith("eval: ")


def test_a_template_that_writes_the_date_is_told(tmp_path: Path) -> None:
    made = tokenizer()
    made.chat_template = "{{ strftime_now('%d %b %Y') }}\n" + made.chat_template
    path = write_chats(tmp_path / "a.jsonl", *greetings(2))
    data = prepare(config(path), made, str(tmp_path / "cache"))
    assert data.report.lines()[-1].startswith("the chat template writes a date")
    assert not read(path).report.notes


def test_instruction_and_a_template_that_is_missing(tmp_path: Path) -> None:
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
    rows, counts, notes = rows_to_score(
        config(path, **changes), tokenizer(), str(Path(path).parent / "cache")
    )
    assert counts.samples == len(rows)
    assert notes == []
    return rows, counts.left_over


def test_the_rows_to_score_are_those_that_a_training_holds_out(tmp_path: Path) -> None:
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


def test_all_rows_are_scored_where_none_are_held_out(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "a.jsonl", *greetings(9))
    assert (len(scored(path)[0]), scored(path)[1]) == (9, 0)
    for limits in ({"max_rows": 4}, {"eval_max_rows": 4}, {"max_rows": 4, "eval_max_rows": 6}):
        assert len(scored(path, **limits)[0]) == 4


def test_a_part_that_holds_nothing_cannot_be_scored(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "a.jsonl", *greetings(3))
    with pytest.raises(DataError, match=r"dataset\.eval_fraction=1e-09 of 3 samples holds none out"):
        scored(path, eval_fraction=1e-9)
