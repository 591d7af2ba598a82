"""`model.add_tokens`: texts that become one token each, in unused rows of the vocabulary."""

import json
from pathlib import Path

import pytest
import yaml

from tests.harness.runs import FINISHED, Zygote

TEXTS = ("<call>", "</call>")
GIVEN = (
    *FINISHED["lora"],
    "dataset=messages",
    "dataset.path=calls.jsonl",
    "dataset.eval_fraction=0.3",
    'model.add_tokens=["<call>","</call>"]',
)


def answer(number: int) -> dict[str, str]:
    return {"role": "assistant", "content": f"<call>{number}</call>"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    rows = [{"messages": [{"role": "user", "content": f"{n} and {n}?"}, answer(n)]} for n in range(40)]
    (tmp_path / "calls.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_new_tokens_are_trained_saved_and_exported(place: Path, zygote: Zygote) -> None:
    rows = "model.architecture.vocab_size=2112"
    zygote.run(place, *GIVEN, rows, "adapter.train_tokens=new", "output_dir=run", code=0)
    run = place / "run"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(run / "final"))
    ids = tokenizer.convert_tokens_to_ids(list(TEXTS))
    assert ids == [len(tokenizer) - 2, len(tokenizer) - 1]
    assert tokenizer("<call>5</call>", add_special_tokens=False).input_ids[0] == ids[0]
    assert yaml.safe_load((run / "run.yaml").read_text())["adapter"]["train_tokens"] == ids
    adapter = json.loads((run / "final" / "adapter_config.json").read_text())
    assert all(each == ids for each in adapter["trainable_token_indices"].values())

    zygote.finish(place, "run=run", "prompt=3 and 3?", "max_new_tokens=3", module="app.generate")
    scored = zygote.finish(place, "run=run", module="app.evaluate")
    assert "these are the rows that the run held out" in scored.stdout
    zygote.finish(place, "run=run", "kind=merged", "to=merged", module="app.export")
    assert json.loads((place / "merged" / "export.json").read_text())["passed"]
    assert AutoTokenizer.from_pretrained(str(place / "merged")).convert_tokens_to_ids(list(TEXTS)) == ids


def test_new_tokens_without_rows_or_that_are_known_are_refused(place: Path, zygote: Zygote) -> None:
    new = ("adapter.train_tokens=new", "output_dir=run")
    ended = zygote.run(place, *GIVEN, *new, code=2)
    assert "0 unused ones for 2 tokens. Resize the base first" in ended.stderr
    ended = zygote.run(place, *GIVEN, *new, 'model.add_tokens=["a"]', code=2)
    assert "model.add_tokens: 'a' is a token of the tokenizer of" in ended.stderr
