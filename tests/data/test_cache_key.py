"""What decides token rows decides their key, and nothing else does."""

import csv
import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from app.data import sources, token_dataset
from app.data.prepare import prepare
from app.errors import DataError
from tests.data.small import LINES, chat, config, tokenizer, write_chats, write_jsonl

# Of CODE_VERSION. If the test below finds another digest, what rows become has changed: raise CODE_VERSION and write
# the new digest here, or users get the old rows from their caches.
GOLDEN = (14, "05cc0882b45a3cd312015820a51d5df6719f668578addc249b00d3f8d8b6ad92")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_chats(tmp_path / "a.jsonl", chat("Hi", "Hello"), chat("Thank you", "You are welcome!"))


def entries(folder: Path) -> list[Path]:
    return sorted((folder / "tokens").iterdir())


def test_cache_key_only_settings_of_rows_change_it(rows: Path, tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"max_length": 100},
        {"max_rows": 1},
        {"train_on": "last"},
        {"on_overflow": "truncate"},
        {"on_unstable_template": "last"},
    ]
    for change in changes:
        prepare(config(rows, **change), tokenizer(), str(tmp_path))
    assert len(entries(tmp_path)) == len(changes)
    for name in ("on_bad_row", "on_overflow", "on_unstable_template"):  # what stops a run changes no row
        prepare(config(rows, **{name: "error"}), tokenizer(), str(tmp_path))
    prepare(config(rows, on_bad_row="skip", on_overflow="drop"), tokenizer(), str(tmp_path))
    assert len(entries(tmp_path)) == len(changes)


def test_cached_bad_rows_stop_a_stricter_run(tmp_path: Path) -> None:
    thought = chat("Hi", "<think>hm</think>Hello", "And?", "<think>oh</think>Bye")
    bad = [{"role": "nobody", "content": ""}]
    rows = write_chats(tmp_path / "a.jsonl", bad, chat("Hi", "x" * 999), thought, bad)
    prepare(config(rows, on_bad_row="skip", on_overflow="drop"), tokenizer("thinking"), str(tmp_path))
    careful = config(rows, on_bad_row="error", on_overflow="error", on_unstable_template="error")
    with pytest.raises(DataError) as error:
        prepare(careful, tokenizer("thinking"), str(tmp_path))
    role, template, length = error.value.problems
    assert role.startswith("a.jsonl:1 and 1 more row: message 0: unknown role 'nobody'")
    assert role.endswith("\n    To skip bad rows, set dataset.on_bad_row=skip")
    assert length.startswith("dataset.max_length=200: 1 of 3 samples of")
    assert "the chat template rewrites earlier turns of 1 conversations" in template
    assert len(entries(tmp_path)) == 1


def test_cache_key_columns_and_format_change_it(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("instruction,input,output,text\nadd,1,3,add 1: 3\n")
    for changes in (
        {"fmt": "instruction"},
        {"fmt": "instruction", "columns": {"input": "text"}},
        {"fmt": "instruction", "columns": {"tools": None}},
        {"fmt": "instruction", "columns": {"chat_template_kwargs": None}},
        {"fmt": "text"},
        {"fmt": "text", "columns": {"text": "output"}},
        {"fmt": "text", "columns": {"prompt": "unused"}},  # the same as without
    ):
        prepare(config(path, **changes), tokenizer(), str(tmp_path))
    assert len(entries(tmp_path)) == 6


def test_cache_key_tokenizer_template_and_code_change_it(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tokenizer()
    template.chat_template = template.chat_template.replace("\n{% endfor", "{% endfor")
    special = tokenizer()
    special.eos_token = "</s>"
    made = [tokenizer(), template, special, tokenizer(size=380), tokenizer(adds_bos=True)]
    for one in [*made, tokenizer()]:
        prepare(config(rows), one, str(tmp_path))
    assert len(entries(tmp_path)) == len(made)
    monkeypatch.setattr(token_dataset, "CODE_VERSION", -1)
    prepare(config(rows), tokenizer(), str(tmp_path))
    assert len(entries(tmp_path)) == len(made) + 1


def test_files_hash_name_time_size_and_ends_change_it(tmp_path: Path) -> None:
    def hashed(folder: str, content: bytes, name: str = "a", time: int = 9) -> str:
        path = tmp_path / folder / "file"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        os.utime(path, ns=(time, time))
        return sources.files_hash([(path, name)])

    content = bytes(3 << 20)
    assert hashed("x", content) == hashed("y", content)
    found = [
        hashed("x", content),
        hashed("x", content, name="b"),
        hashed("x", content, time=10),
        hashed("x", content + b"\0"),
        hashed("x", b"1" + content[1:]),
        hashed("x", content[1:] + b"1"),
    ]
    assert len(set(found)) == len(found)


def as_csv(path: Path, rows: list[dict[str, str]], delimiter: str = ",") -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def sets(folder: Path) -> list[tuple[str, str | None, Path]]:
    """Rows of all formats and kinds of file: format, template, file."""
    thought = chat("Hi", "<think>hm</think>Hello", "And?", "<think>oh</think>Bye", system="Be brief.")
    weighed = [{**message, "weight": 0.5} if at == 1 else message for at, message in enumerate(chat("a", "b"))]
    talks: list[Any] = [thought, weighed, chat("Hi", "x" * 999), chat("Hi", " "), [], chat(*LINES)]
    call = {"type": "function", "function": {"name": "rain", "arguments": {"where": "here"}}}
    talks.append([*chat("Hi"), {"role": "assistant", "content": "", "tool_calls": [call]}, *chat("a", "b")])
    pairs = [{"from": ("human", "gpt")[at % 2], "value": line} for at, line in enumerate(LINES)]
    sharegpt = folder / "sharegpt.json"
    sharegpt.write_text(json.dumps([{"conversations": pairs}, {"conversations": pairs[:2], "system": "Be"}]))
    tasks = [{"instruction": line, "input": more, "output": "yes"} for line, more in zip(LINES, LINES, strict=True)]
    asked = [{"question": line, "answer": line[::-1]} for line in LINES[::2]]
    drafted = [{"prompt": "two ", "completion": "make"}, {"prompt": "two", "completion": " make four"}]
    chosen = [{"prompt": chat("Hi"), "completion": [{"role": "assistant", "content": line}]} for line in LINES]
    labeled = [{"text": line, "label": str(at % 2)} for at, line in enumerate(LINES)]
    sided = [{"sentence1": line, "sentence2": "rain " * 40 * at, "label": "b"} for at, line in enumerate(LINES)]
    numbered = [{"input_ids": [*range(20, 20 + at)], "labels": [-100, *range(21, 20 + at)]} for at in range(1, 5)]
    (folder / "book.txt").write_text("\n".join(LINES * 9))
    return [
        ("messages", "thinking", write_chats(folder / "a.jsonl", *talks)),
        ("messages", "llama3", folder / "a.jsonl"),
        ("sharegpt", "chatml", sharegpt),
        ("instruction", "mistral", as_csv(folder / "a.csv", tasks)),
        ("question_answer", "chatml", as_csv(folder / "a.tsv", asked, "\t")),
        ("prompt_completion", None, write_jsonl(folder / "p.jsonl", drafted)),
        ("chat_completion", "gemma", write_jsonl(folder / "c.jsonl", chosen)),
        ("text", None, folder / "book.txt"),
        ("labelled_text", None, as_csv(folder / "l.csv", labeled)),
        ("text_pair", None, write_jsonl(folder / "s.jsonl", sided)),
        ("token_ids", None, write_jsonl(folder / "i.jsonl", numbered)),
    ]


def test_code_version_golden_digest_of_rows(tmp_path: Path) -> None:
    digest = hashlib.sha256()
    for fmt, kind, path in sets(tmp_path):
        settings = config(path, fmt, on_bad_row="skip", on_overflow="split" if fmt == "text" else "drop")
        data = prepare(settings, tokenizer(kind), str(tmp_path / "cache"))
        rows, numbers = data.train, range(len(data.train))
        places = [(rows.source_location(i), rows.second_start(i)) for i in numbers]
        counts = {**asdict(data.report.train), "source": ""}
        facts = (rows.fingerprint, rows.split_hashes.tolist(), places, rows.class_counts(), counts)
        digest.update(json.dumps(facts, sort_keys=True).encode())
    assert (token_dataset.CODE_VERSION, digest.hexdigest()) == GOLDEN
