"""An encoder from the command line: hidden tokens are learned and exported like anything else."""

import json
from pathlib import Path

from tests.harness.runs import Zygote, losses

SMALL = (
    "model=modernbert",
    "model.weights=random",
    "model.architecture.vocab_size=1500",
    "model.architecture.hidden_size=64",
    "model.architecture.intermediate_size=64",
    "model.architecture.num_hidden_layers=2",
    "model.architecture.num_attention_heads=4",
    "model.architecture.local_attention=16",
    *(f"model.architecture.{role}_token_id={i}" for role, i in (("bos", 2), ("eos", 3), ("cls", 2), ("sep", 3))),
    "model.architecture.pad_token_id=0",
    "dataset=text",
    "dataset.path=text.jsonl",
    "dataset.eval_fraction=0.1",
    "dataset.max_length=48",
    "batching.tokens=192",
    "recipe=full",
    "optimizer.lr=3e-3",
    "precision=fp32",
    "launch.threads=1",
    "record.every=1",
    "eval.samples=1",
)


def write_days(folder: Path) -> None:
    """Text in which every token follows from its neighbors."""
    days = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
    rows = [" ".join(days[(start + i) % 7] for i in range(8)) for start in range(7)] * 12
    (folder / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"{i}. {row}"}) + "\n" for i, row in enumerate(rows))
    )


def test_masked_encoder_learns_and_exports(tmp_path: Path, quick_zygote: Zygote) -> None:
    folder = tmp_path
    write_days(folder)
    ended = quick_zygote.run(folder, *SMALL, "output_dir=run", "training.epochs=6", code=0)
    found = losses(folder / "run")
    assert sum(found[-3:]) < 0.7 * sum(found[:3])
    assert "[MASK]" in (folder / "run" / "samples.jsonl").read_text(), "a sample with its hidden tokens is kept"
    assert "prompt " in ended.stdout

    from transformers import AutoModelForMaskedLM, AutoTokenizer

    lm = AutoModelForMaskedLM.from_pretrained(str(folder / "run" / "final"))
    tokenizer = AutoTokenizer.from_pretrained(str(folder / "run" / "final"))
    assert type(lm).__name__ == "ModernBertForMaskedLM"
    assert tokenizer.mask_token == "[MASK]"

    quick_zygote.finish(folder, "run=run", "to=out", "kind=merged", module="app.export")
    proof = json.loads((folder / "out" / "export.json").read_text())
    assert proof["passed"]
    assert 0 < proof["difference"] < proof["tolerance"]
    assert 'AutoModelForMaskedLM.from_pretrained(here, dtype="auto")' in (folder / "out" / "README.md").read_text()

    refused = quick_zygote.run(folder, "run=run", "prompt=x", module="app.generate", code=2)
    assert "a model of task=masked does not generate text" in refused.stderr
