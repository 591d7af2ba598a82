"""What a real run says of rows that are not as they should be: once on the screen, and as numbers in the manifest."""

import json
from pathlib import Path
from typing import Any

from tests.data.small import THINKING, chat, write_chats
from tests.harness.runs import SMALL, Zygote

TEMPLATE = THINKING.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'tool' %}")
BAD = [
    b'{"messages": [{"role": "robot", "content": "a"}]}\n' * 2,
    b'{"messages": [{"role": "user", "content": "\xe9t\xe9"}]}\n',
    b"\0" * 20 + b"\n",
]


def everything_at_once(folder: Path) -> Path:
    """34 rows of ten kinds; what becomes of each is known."""
    folder.mkdir()
    (folder / "notes.pdf").write_bytes(b"%PDF")
    good = [chat(f"Question {n}", f"Answer {n}") for n in range(25)]
    thought = [chat("Hi", f"<think>hm</think>{n}", "And?", f"<think>oh</think>{n}") for n in range(2)]
    beside = [[*chat("Hi"), {"role": "tool", "content": "42"}, *chat("", "Hello")[1:]]]
    long = [chat("word " * 3000, "Yes"), chat("Say it", "word " * 4000)]
    path = write_chats(folder / "rows.jsonl", *good, *thought, *beside, *long)
    path.write_bytes(path.read_bytes() + b"".join(BAD))
    return folder


def test_odd_rows_are_counted_and_reported_once(zygote: Zygote, tmp_path: Path) -> None:
    rows = everything_at_once(tmp_path / "rows")
    held = [chat("Question 3", "Answer 3"), chat("Hi", "<think>a</think>b", "And?", "<think>c</think>d")]
    write_chats(tmp_path / "held.jsonl", *held, chat("More", "than wanted"))
    (tmp_path / "template").write_text(TEMPLATE)
    given = ("dataset=messages", f"dataset.path={rows}", "dataset.eval_fraction=0", "dataset.on_bad_row=skip")
    more = (
        "dataset.max_length=128",
        "batching.tokens=128",
        "dataset.on_overflow=drop",
        "dataset.eval_path=held.jsonl",
        "model.chat_template=template",
    )
    limits = ("dataset.max_rows=null", "dataset.eval_max_rows=2", "dry_run=true", "output_dir=run")
    ended = zygote.run(tmp_path, *SMALL, *given, *more, *limits, COLUMNS="300", code=0)
    counts: dict[str, Any] = json.loads((tmp_path / "run" / "manifest.json").read_text())["counts"]["data"]
    train, held_out = counts["train"], counts["eval"]
    expected = {
        "rows_read": 34,
        "rows_kept": 28,
        "rows_lost": 2,
        "bad_rows": 4,
        "samples": 30,
        "over_long": 2,
        "dropped": 2,
        "truncated": 0,
        "split": 0,
        "unstable": 2,
        "expanded_into": 4,
        "unseen": 1,
        "left_over": 0,
        "held_out": 0,
        "files_left_out": ["notes.pdf"],
    }
    assert {name: train[name] for name in expected} == expected
    assert train["bad_places"] == [f"rows.jsonl:{n}" for n in range(31, 35)]
    expected = {"rows_read": 2, "rows_kept": 2, "samples": 2, "unstable": 1, "expanded_into": 2, "left_over": 1}
    assert {name: held_out[name] for name in expected} == expected
    assert counts["shared"] == 1
    said = " ".join(ended.stdout.split())
    for words in (
        "train: 34 rows -> 30 samples",
        "train: 1 file of the folder not read: notes.pdf",
        "train: 4 bad rows skipped: rows.jsonl:31, rows.jsonl:32, rows.jsonl:33, ... (rows.jsonl:31: message 0 has",
        "train: 2 samples longer than dataset.max_length",
        "2 dropped",
        "train: the chat template rewrites earlier turns: 2 conversations became 4 samples",
        "train: the chat template leaves out what 1 message of system, user or tool say",
        "eval: 1 sample beyond the wanted number not used",
        "eval: 1 sample of it also trained on",
    ):
        assert said.count(words) == 1, (words, ended.stdout)
