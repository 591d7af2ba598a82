"""The files that the documents speak of: small, real, and there before a command is typed."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.assets import ROOT

ROWS = 60


def rows_of_the_sample() -> list[dict[str, list[dict[str, str]]]]:
    lines = (ROOT / "sample" / "train.jsonl").read_text().splitlines()[:ROWS]
    return [json.loads(line) for line in lines]


def _chat(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of_the_sample()))


def _tables(folder: Path) -> None:
    """With the answers in a column of another name."""
    folder.mkdir()
    for part in range(2):
        rows = [f'"What is {n} and {part}?","{n + part}"' for n in range(ROWS)]
        (folder / f"part-{part}.csv").write_text("\n".join(["instruction,answer", *rows]) + "\n")


def _turns(path: Path) -> None:
    speakers = {"system": "system", "user": "human", "assistant": "gpt"}
    talks = [
        [{"from": speakers[turn["role"]], "value": turn["content"]} for turn in row["messages"]]
        for row in rows_of_the_sample()
    ]
    path.write_text("".join(json.dumps({"conversations": turns}) + "\n" for turns in talks))


def _sums(path: Path) -> None:
    rows = [{"question": f"What is {n} and {n}?", "answer": str(n + n)} for n in range(ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _questions(path: Path) -> None:
    asked = [{"messages": [row["messages"][0]]} for row in rows_of_the_sample()[:2]]
    path.write_text("".join(json.dumps(row) + "\n" for row in asked))


def _reviews(path: Path) -> None:
    words = {"good": ("lovely", "warm"), "bad": ("awful", "cold")}
    rows = [(label, words[label][n % 2]) for n in range(ROWS) for label in words]
    told = [f"The meal number {n} was {word}.,{label}" for n, (label, word) in enumerate(rows)]
    path.write_text("\n".join(["text,label", *told]) + "\n")


def _topics(path: Path) -> None:
    rows = [{"text": f"Page {n} of them.", "label": ["war", "art"][: n % 3]} for n in range(ROWS)]
    _write_rows(path, rows)


def _stars(path: Path) -> None:
    _write_rows(path, [{"text": f"Meal {n} was warm.", "label": n % 5 + 0.5} for n in range(ROWS)])


def _names(path: Path) -> None:
    words, tags = ["Anna", "went", "to", "Rome"], ["B-PER", "O", "O", "B-LOC"]
    _write_rows(path, [{"tokens": words[n % 3 :], "tags": tags[n % 3 :]} for n in range(ROWS)])


def _tokens(path: Path) -> None:
    rows = [[3, *range(20 + n, 30 + n)] for n in range(ROWS)]
    _write_rows(path, [{"input_ids": ids, "labels": [-100] * 4 + ids[4:]} for ids in rows])


def _function(path: Path) -> None:
    path.write_text("def clean(row):\n    return row if row['answer'] else None\n")


def _axolotl(path: Path) -> None:
    path.write_text(
        "base_model: asset:tiny\nadapter: lora\nlora_r: 8\nlora_alpha: 16\nsequence_len: 128\nmicro_batch_size: 2\n"
        "datasets: [{path: chat.jsonl, type: chat_template}]\nval_set_size: 0.1\nlearning_rate: 1e-3\nnum_epochs: 1\n"
        "sample_packing: true\ntrust_remote_code: false\nspecial_tokens:\n"
    )


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _preferences(path: Path) -> None:
    asked = [[{"role": "user", "content": f"What is {n} and {n}?"}] for n in range(ROWS)]
    said = [[{"role": "assistant", "content": word}] for word in ("Yes.", "No.")]
    rows = [{"prompt": prompt, "chosen": said[0], "rejected": said[1]} for prompt in asked]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _with_splits(path: Path) -> None:
    path.mkdir()
    _sums(path / "train.jsonl")
    _sums(path / "test.jsonl")


STAND_INS: dict[str, Callable[[Path], None]] = {
    "chat.jsonl": _chat,
    "new.jsonl": _chat,
    "questions.jsonl": _questions,
    "rows.jsonl": _turns,
    "sums.jsonl": _sums,
    "preferences.jsonl": _preferences,
    "downloaded": _with_splits,
    "reviews.csv": _reviews,
    "topics.jsonl": _topics,
    "stars.jsonl": _stars,
    "names.jsonl": _names,
    "tokens.jsonl": _tokens,
    "mine.py": _function,
    "data": _tables,
    "axolotl.yaml": _axolotl,
}


def lay_out(folder: Path) -> None:
    """Every stand-in, in an empty folder."""
    for name, make in STAND_INS.items():
        make(folder / name)


def finished_run(prepared: Path, folder: Path, command: str) -> None:
    """runs/mine, where a command is about a run that the document has not made; others of its kind likewise."""
    wanted = dict.fromkeys(("runs/mine", "runs/other"), prepared / "runs" / "mine")
    wanted["models/mine"] = prepared / "models" / "mine"
    for name, source in wanted.items():
        about = re.search(rf"(run|runs|path|from|adapters)=\"?\[?([^ ]+,)*{name}\b", command)
        if about and not (folder / name).exists():
            shutil.copytree(source, folder / name)
