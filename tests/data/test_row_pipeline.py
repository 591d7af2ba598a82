"""From rows to token rows: what is kept, what is counted, and how bad rows are reported."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.data import row_pipeline
from app.data.formats import empty_parts, read_row
from app.data.prepare import Data, prepare
from app.errors import DataError
from tests.data.small import chat, config, tokenizer, trained_texts, write_chats, write_jsonl

GOOD = {"messages": chat("Hi", "Hello")}
TYPO: dict[str, Any] = {"messages": [{"role": "asistant", "content": "Hi"}]}


def read(path: Path, fmt: str = "messages", kind: str | None = "chatml", **changes: Any) -> Data:
    return prepare(config(path, fmt, **changes), tokenizer(kind), str(path.parent / "cache"))


def problems(path: Path, fmt: str = "messages", **changes: Any) -> tuple[str, ...]:
    with pytest.raises(DataError) as error:
        read(path, fmt, **changes)
    return error.value.problems


def test_write_rows_keeps_order_and_location(tmp_path: Path) -> None:
    rows = [{"messages": chat("Hi", "x" * n)} for n in range(5)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    data = read(path)
    assert [data.train.source_location(i) for i in range(5)] == [f"a.jsonl:{i}" for i in range(1, 6)]
    made = tokenizer("chatml")
    texts = [trained_texts(made, data.train.ids(i), data.train.loss_mask(i)) for i in range(5)]
    assert texts == [["x" * n + "<|im_end|>"] for n in range(5)]


def test_write_rows_independent_of_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": chat("Hi", "x" * n)} for n in range(9)])
    fingerprints = set()
    for rows, chars in ((512, 1 << 21), (2, 1 << 21), (512, 50)):
        monkeypatch.setattr(row_pipeline, "BATCH_ROWS", rows)
        monkeypatch.setattr(row_pipeline, "BATCH_CHARS", chars)
        data = prepare(config(path), tokenizer(), str(tmp_path / f"{rows}-{chars}"))
        assert len(data.train) == 9
        fingerprints.add(data.train.fingerprint)
    assert len(fingerprints) == 1


def test_bad_rows_reported_together(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [GOOD, TYPO, GOOD, {"messages": chat("Hi")}])
    path.write_text(path.read_text() + '{"messages": \n')
    first, second, third = problems(path)
    assert first.startswith("a.jsonl:2: message 0: unknown role 'asistant'")
    assert second.startswith("a.jsonl:4: no assistant message")
    assert third.startswith("a.jsonl:5: column 13: Expecting value")
    assert third.endswith("\n    To skip bad rows, set dataset.on_bad_row=skip")


def test_bad_rows_all_of_them_skipping_not_advised(tmp_path: Path) -> None:
    [problem] = problems(write_jsonl(tmp_path / "a.jsonl", [{"messages": chat("Hi")}] * 600))
    assert problem.startswith(
        "a.jsonl:1 and 511 more rows: no assistant message, so there is nothing to train on (dataset.train_on=auto);"
    )
    assert problem.endswith("\n    All 512 rows read are bad. Fix them, or set dataset.path to other rows")
    assert "on_bad_row" not in problem


def test_bad_rows_at_most_five_reasons(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": f"r{n}", "content": ""}]} for n in range(9)]
    assert len(problems(write_jsonl(tmp_path / "a.jsonl", rows))) == 5


def test_bad_rows_one_reason_in_several_messages_once(tmp_path: Path) -> None:
    rows = [{"messages": [*chat("a", "b") * n, {"role": "user"}]} for n in range(3)]
    [problem] = problems(write_jsonl(tmp_path / "a.jsonl", rows))
    assert problem.startswith("a.jsonl:1 and 2 more rows: message 0: content must be text")


def test_bad_rows_stop_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_pipeline, "BATCH_ROWS", 2)
    path = write_jsonl(tmp_path / "a.jsonl", [TYPO, GOOD, {"chat": []}])
    assert len(problems(path)) == 1


def test_bad_rows_skipped_are_listed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD, *[TYPO] * 25, GOOD])
    data = read(path, on_bad_row="skip")
    assert [data.train.source_location(i) for i in range(len(data.train))] == ["a.jsonl:1", "a.jsonl:27"]
    counts = data.report.train
    assert (counts.rows_read, counts.rows_kept, counts.bad_rows) == (27, 2, 25)
    assert counts.bad_places == [f"a.jsonl:{n}" for n in range(2, 22)]
    lines = [line for line in data.report.lines() if "bad rows" in line]
    assert lines[0].startswith("train: 25 bad rows skipped: a.jsonl:2, a.jsonl:3, a.jsonl:4, ... (a.jsonl:2: message 0")


def test_no_rows_left_reported(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [TYPO, {"messages": chat("Hi", "x" * 999)}])
    [problem] = problems(path, on_bad_row="skip", on_overflow="drop")
    assert "none of 2 rows can be used for training; 1 bad, first: a.jsonl:1: message 0: unknown role" in problem
    assert "; 1 longer than dataset.max_length=200" in problem


def test_completion_glued_to_prompt_is_bad_row(tmp_path: Path) -> None:
    rows = [{"prompt": "two ", "completion": "make"}, {"prompt": "two ", "completion": "make four"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert problems(path, "prompt_completion")[0].startswith(
        "a.jsonl:1: the completion shares its only token with the end"
    )
    data = read(path, "prompt_completion", on_bad_row="skip")
    assert data.report.train.glued == 1
    assert "train: 1 sample with a token across prompt and answer, which is not trained" in data.report.lines()


def test_blank_texts_counted(tmp_path: Path) -> None:
    said = (("Hi", "Hello"), ("", "Hello"), ("Hi", ""), ("Hi", " "), ("", ""))
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": asked, "answer": answer} for asked, answer in said])
    data = read(path, "question_answer")
    assert data.report.train.empty == {"column question": 2, "column answer": 3}
    assert data.report.train.bad_rows == 0
    line = "train: empty or whitespace-only texts: 2 in column question, 3 in column answer"
    assert data.report.lines().count(line) == 1
    calls = [{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]
    rows = [chat("Hi", ""), chat(" ", "Hello"), chat("Hi", "", "a", "b", system="")]
    data = read(write_chats(tmp_path / "b.jsonl", *rows))
    assert data.report.train.empty == {"assistant messages": 2, "user messages": 1}
    row = {"messages": [*chat("Hi"), *calls, *chat("a", "b")]}
    content = read_row(row, "messages", config("x").columns)
    assert list(empty_parts(row, content, "messages", config("x").columns)) == []


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_empty_cells_are_null(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    text = 'question,answer,system\nHi,Hello,\n,Hello,\nHi,,\nHi, ,\n"","",\n'
    path.write_text(text.replace(",", "\t") if name.endswith(".tsv") else text)
    [question, answer] = problems(path, "question_answer")
    assert question.startswith(f"{name}:3 and 1 more row: column 'question' must be text, found null")
    assert answer.startswith(f"{name}:4: column 'answer' must be text, found null")
    report = read(path, "question_answer", on_bad_row="skip").report.train
    assert (report.rows_kept, report.bad_rows, report.empty) == (2, 3, {"column answer": 1})


def test_tsv_read_without_quoting_noted_from_the_cache_too(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text('id\ttext\n1\t" Hello , he said\n2\tend "\n')
    for _ in range(2):
        data = read(path, "text", None)
        assert len(data.train) == 2
        note = "train: a.tsv: quotes are read as ordinary characters because they do not enclose whole fields"
        assert data.report.lines().count(note) == 1


def test_empty_completion_trains_end(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "two", "completion": ""}])
    assert read(path, "prompt_completion").report.train.trained_tokens == 1


def test_unstable_template_counted(tmp_path: Path) -> None:
    thought = chat("Hi", "<think>hm</think>Hello", "And?", "<think>oh</think>Bye")
    path = write_chats(tmp_path / "a.jsonl", thought, chat("Hi", "Hello"), thought)
    data = read(path, kind="thinking")
    assert [data.train.source_location(i) for i in range(5)] == [f"a.jsonl:{n}" for n in (1, 1, 2, 3, 3)]
    counts = data.report.train
    assert (counts.rows_kept, counts.samples, counts.unstable, counts.expanded_into) == (3, 5, 2, 4)
    rewrites = "train: the chat template rewrites earlier turns: 2 conversations"
    [reported] = [line for line in data.report.lines() if "rewrites" in line]
    assert reported == f"{rewrites} became 4 samples, one per trained turn"
    only = read(path, kind="thinking", on_unstable_template="last")
    assert only.report.train.samples == 3
    assert f"{rewrites} train only the last turn" in only.report.lines()


def test_endless_answers_counted(tmp_path: Path) -> None:
    made = tokenizer("chatml")
    made.chat_template = made.chat_template.replace("<|im_end|>", "")
    data = prepare(config(write_chats(tmp_path / "a.jsonl", chat("Hi", "Hello"))), made, str(tmp_path / "c"))
    assert data.report.train.endless == 1
    assert any("the model will not learn to stop" in line for line in data.report.lines())


def test_text_split_into_pieces(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Rain falls on the roof. " * 40)
    data = read(tmp_path / "book.txt", "text", kind=None, max_length=32)
    counts = data.report.train
    assert counts.samples == counts.pieces > 2
    assert (counts.rows_kept, counts.split, counts.tokens_lost) == (1, 1, 0)
    assert {data.train.source_location(i) for i in range(len(data.train))} == {"book.txt"}
    assert counts.trained_tokens == counts.longest - 1
    assert data.train.ids(len(data.train) - 1)[-1] == tokenizer(None).eos_token_id


words = st.sampled_from(["Hi", "two and two", "x" * 300, "\ud800", ""])


@settings(max_examples=40)
@given(
    said=st.lists(st.lists(words, max_size=5), min_size=1, max_size=12),
    policy=st.sampled_from(["drop", "truncate"]),
    kind=st.sampled_from(["chatml", "thinking"]),
)
def test_counts_account_for_every_row(
    tmp_path_factory: pytest.TempPathFactory, said: list[list[str]], policy: str, kind: str
) -> None:
    rows = [GOOD, *({"messages": chat(*contents)} for contents in said)]
    path = write_jsonl(tmp_path_factory.mktemp("rows") / "a.jsonl", rows)
    data = read(path, kind=kind, on_bad_row="skip", on_overflow=policy, max_length=60)
    counts = data.report.train
    assert counts.rows_read == len(rows) == counts.rows_kept + counts.rows_lost + counts.bad_rows
    assert counts.over_long == counts.dropped + counts.truncated
    assert counts.rows_kept == len({data.train.source_location(i) for i in range(len(data.train))})
    assert counts.samples == len(data.train)
    assert counts.tokens == sum(len(data.train.ids(i)) for i in range(len(data.train)))
    assert counts.trained_tokens == sum(data.train.loss_mask(i).sum() for i in range(len(data.train))) > 0
