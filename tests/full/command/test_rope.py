"""A run with a scaled RoPE: rows beyond the positions of the base, what its adapter lacks, and what exports carry."""

import json
from pathlib import Path

import pytest

from tests.harness.runs import Zygote

pytest.importorskip("xllamacpp")

ROPE = ("model.rope=yarn", "model.rope_factor=4")
# the small model, pretrained, of 512 positions
RUN = ("dataset.max_length=640", "batching.tokens=640", "batching.accumulation=1", "dataset.max_rows=8")
SHORT = ("training.max_steps=2", "eval.samples=0", "eval.every=0", "precision=fp32", "launch.threads=1")


def test_run_with_scaled_rope_is_exported_with_it(quick_zygote: Zygote, tmp_path: Path) -> None:
    text = " ".join(["goose"] * 500)
    rows = [{"prompt": f"{text} {at}", "completion": text[:300]} for at in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (*ROPE, *RUN, *SHORT, "dataset=rows.jsonl", "dataset.eval_fraction=0.3", "output_dir=run")
    quick_zygote.finish(tmp_path, *words)
    lengths = json.loads((tmp_path / "run" / "manifest.json").read_text())["counts"]["data"]["train"]
    assert lengths["longest"] > 512
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    assert 'text.rope_parameters = {"' in card.replace("'", '"')
    assert "text.max_position_embeddings = 2048" in card
    assert "vllm serve" not in card

    asked = quick_zygote.run(tmp_path, "run=run", "prompt=goose", "max_new_tokens=2", module="app.generate", code=0)
    assert "The adapter does not store it" in asked.stderr
    assert '"max_position_embeddings": 2048' in asked.stderr
    for kind in ("adapter", "merged", "gguf"):
        made = quick_zygote.run(tmp_path, "run=run", f"kind={kind}", f"to={kind}", module="app.export", code=0)
        assert ("does not store its RoPE" in made.stdout) == (kind == "adapter")
    merged = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert merged["max_position_embeddings"] == 2048
    assert merged["rope_scaling"]["rope_type"] == merged["rope_parameters"]["rope_type"] == "yarn"

    more = ("training.max_steps=3", "output_dir=run", "resume=auto")
    refused = quick_zygote.run(tmp_path, *words, *more, "model.rope_factor=2", code=2)
    assert "model.rope_factor changed from 4.0 to 2.0" in refused.stderr
