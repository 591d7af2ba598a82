"""Rows of token IDs and rows of a Python function, in whole runs."""

import json
from pathlib import Path

from app.base.tokenizer import load_tokenizer
from app.data.prepare import prepare
from tests.data.small import config
from tests.data.test_token_ids import as_token_ids
from tests.harness.composed import composed
from tests.harness.runs import SMALL, Zygote, losses

FEW = (*SMALL, "eval.samples=0", "precision=fp32", "training.max_steps=2")
LINES = [("What is one?", "The first."), ("What is two?", "The second."), ("And three?", "The last of them.")]
FUNCTION = """def clean(row):
    if not row["a"]:
        return None
    turns = [{"role": "user", "content": row["q"]}, {"role": "assistant", "content": row["a"]}]
    return {"messages": turns}
"""


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_token_ids_train_as_the_messages_they_were_made_from(zygote: Zygote, tmp_path: Path) -> None:
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in LINES * 8]
    write(tmp_path / "chats.jsonl", [{"messages": messages} for messages in turns])
    chats = prepare(
        config(tmp_path / "chats.jsonl"), load_tokenizer(composed().model, needs_template=True), str(tmp_path / "cache")
    )
    write(tmp_path / "ids.jsonl", [dict(row) for row in as_token_ids(chats, padding=1)])
    zygote.run(tmp_path, *FEW, "dataset=messages", "dataset.path=chats.jsonl", "output_dir=text", code=0)
    zygote.run(tmp_path, *FEW, "dataset=auto", "dataset.path=ids.jsonl", "output_dir=ids", code=0)
    assert losses(tmp_path / "ids") == losses(tmp_path / "text")
    words = ("task=classification", "dataset=token_ids", "dataset.path=ids.jsonl", "output_dir=other")
    zygote.refused(tmp_path, *FEW, *words, message="format=token_ids: task=classification needs labels")


def test_transform_is_typed_again_and_compared(zygote: Zygote, tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [{"q": q, "a": a} for q, a in [*LINES * 8, ("Why?", "")]])
    (tmp_path / "mine.py").write_text(FUNCTION)
    train = (*FEW, "dataset=messages", "dataset.path=rows.jsonl", "dataset.transform=mine:clean", "output_dir=run")
    stopped = zygote.run(tmp_path, *train, "training.stop_after=1", code=75)
    assert "1 row dropped by dataset.transform" in stopped.stdout
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["transform"]["name"], len(manifest["hashes"]["transform"])) == ("mine:clean", 64)

    (tmp_path / "mine.py").write_text(f"{FUNCTION}# changed\n")
    zygote.refused(tmp_path, *train, "resume=auto", message="dataset.transform (as a hash): the checkpoint has")
    (tmp_path / "mine.py").write_text(FUNCTION)
    zygote.run(tmp_path, *train, "resume=auto", code=0)

    message = "dataset.transform=mine:clean in run.yaml is not accepted from a file, because it decides which code runs"
    zygote.refused(tmp_path, "run=run", module="app.reproduce", message=message)
    again = ("run=run", "steps=1", "dataset.transform=mine:clean")
    ended = zygote.run(tmp_path, *again, module="app.reproduce", code=0)
    assert "bit-identical" in ended.stdout
