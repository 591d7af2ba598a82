"""A mix through a real run: trained, told, scored again."""

import json
from pathlib import Path

from tests.data.small import chat, write_chats
from tests.harness.runs import SMALL, Zygote

MIX = ("dataset=mix", "dataset.mix.chat.path=chat.jsonl", "dataset.mix.code.path=code.jsonl")
PLAIN = (
    "dataset.max_rows=null",
    "dataset.eval_fraction=0.2",
    "dataset.eval_max_rows=null",
    "training.max_steps=2",
    "eval.samples=0",
)


def test_mix_trains_and_scores_held_out_rows(zygote: Zygote, tmp_path: Path) -> None:
    write_chats(tmp_path / "chat.jsonl", *(chat("Hi", f"Hello {n}") for n in range(40)))
    write_chats(tmp_path / "code.jsonl", *(chat("Hi", f"Print {n}") for n in range(15)), chat("Hi", "Hello 1"))
    given = (*SMALL, *MIX, *PLAIN, "dataset.mix.code.weight=2.5", "output_dir=run")
    ended = zygote.run(tmp_path, *given, COLUMNS="300", code=0)
    data = json.loads((tmp_path / "run" / "manifest.json").read_text())["counts"]["data"]
    code = data["shares"]["code"]
    held = {name: counts["held_out"] for name, counts in data["sources"].items()}
    assert (data["sources"]["code"]["rows_read"], code["samples"]) == (16, 16 - held["code"])
    assert code["drawn"] == 2 * code["samples"] + round(code["samples"] / 2)
    assert data["train"]["samples"] == data["shares"]["chat"]["drawn"] + code["drawn"]
    assert data["eval"]["samples"] == sum(held.values()) > 0
    assert data["sources"]["code"]["duplicates"] == 1
    said = " ".join(ended.stdout.split())
    assert said.count(f"train code: weight 2.5, {code['drawn']} samples per epoch") == 1
    assert said.count("train code: 1 duplicate sample: kept") == 1
    scored = zygote.run(tmp_path, "run=run", module="app.evaluate", code=0)
    assert "this is the eval set of the run" in scored.stdout
    other = zygote.run(
        tmp_path, "run=run", "dataset.path=code.jsonl", "output_dir=other", module="app.evaluate", code=0
    )
    assert "scored: 16 rows" in other.stdout
