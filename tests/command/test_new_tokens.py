"""`model.add_tokens`: texts that become one token each, in unused rows of the vocabulary or in new ones."""

import json
from pathlib import Path

import pytest
import yaml

from tests.harness.runs import FINISHED, Zygote

TEXTS = ("<call>", "</call>")
ROWS = (
    "dataset=messages",
    "dataset.path=calls.jsonl",
    "dataset.eval_fraction=0.3",
    'model.add_tokens=["<call>","</call>"]',
)
GIVEN = (*FINISHED["lora"], *ROWS)
BINS = ("batching.tokens=64", "batching.accumulation=1", "eval.samples=0")
# of 1,536 rows, all of them used
SHIPPED = (*ROWS, "model=tiny", "precision=fp32", "launch.threads=1", "dataset.max_length=64", *BINS)


def answer(number: int) -> dict[str, str]:
    return {"role": "assistant", "content": f"<call>{number}</call>"}


def write_calls(folder: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{n} and {n}?"}, answer(n)]} for n in range(40)]
    (folder / "calls.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_calls(tmp_path)
    return tmp_path


def test_new_tokens_are_trained_saved_and_exported(place: Path, quick_zygote: Zygote) -> None:
    rows = "model.architecture.vocab_size=2112"
    quick_zygote.run(place, *GIVEN, rows, "adapter.train_tokens=new", "output_dir=run", code=0)
    run = place / "run"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(run / "final"))
    ids = tokenizer.convert_tokens_to_ids(list(TEXTS))
    assert ids == [len(tokenizer) - 2, len(tokenizer) - 1]
    assert tokenizer("<call>5</call>", add_special_tokens=False).input_ids[0] == ids[0]
    assert yaml.safe_load((run / "run.yaml").read_text())["adapter"]["train_tokens"] == ids
    adapter = json.loads((run / "final" / "adapter_config.json").read_text())
    assert all(each == ids for each in adapter["trainable_token_indices"].values())

    quick_zygote.finish(place, "run=run", "prompt=3 and 3?", "max_new_tokens=3", module="app.generate")
    scored = quick_zygote.finish(place, "run=run", module="app.evaluate")
    assert "this is the eval set of the run" in scored.stdout
    quick_zygote.finish(place, "run=run", "kind=merged", "to=merged", module="app.export")
    assert json.loads((place / "merged" / "export.json").read_text())["passed"]
    assert AutoTokenizer.from_pretrained(str(place / "merged")).convert_tokens_to_ids(list(TEXTS)) == ids


def test_new_tokens_without_rows_or_that_are_known_are_refused(place: Path, zygote: Zygote) -> None:
    new = ("adapter.train_tokens=new", "output_dir=run")
    ended = zygote.run(place, *GIVEN, *new, code=2)
    assert "add_tokens: the weights are random. Set model.architecture.vocab_size=1600." in ended.stderr
    ended = zygote.run(place, *GIVEN, *new, 'model.add_tokens=["a"]', code=2)
    assert "model.add_tokens: 'a' is a token of the tokenizer of" in ended.stderr
    shipped = (*SHIPPED, *new, "recipe=lora")
    zygote.refused(
        place, *shipped, "model.vocab_size=9", message="model.vocab_size=9: the base has 1536 rows, and none"
    )
    message = "model.vocab_size=1537: new tokens have ids up to 1537. Set 1538 or more"
    zygote.refused(place, *shipped, "model.vocab_size=1537", message=message)
