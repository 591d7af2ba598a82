"""Runs of models that read more than text: killed and resumed, scored, asked, and exported as parts of the whole."""

import json
import random
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file

from app.model.save import save_tokenizer
from app.model.tokenizer import load_tokenizer
from tests.harness.runs import SMALL, Zygote, killed_and_resumed, result, same_ending
from tests.model.small import model_config
from tests.model.wholes import WHOLES, saved_whole

_ROWS = tuple(word for word in SMALL if not word.startswith("model."))


def _base(kind: str, folder: Path) -> Path:
    """With the tokenizer that ships, and a file of a processor."""
    tokenizer = load_tokenizer(model_config(), needs_template=True)
    given = dict(WHOLES[kind])
    given["text_config"] = given["text_config"] | {"vocab_size": len(tokenizer), "max_position_embeddings": 128}
    saved_whole(transformers.AutoConfig.for_model(kind, **given), folder)
    save_tokenizer(tokenizer, folder)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "SiglipImageProcessor"}')
    return folder


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_killed_run_resumes_bit_for_bit_and_is_exported_as_its_whole(kind: str, zygote: Zygote, tmp_path: Path) -> None:
    base = _base(kind, tmp_path / "base")
    command = (*_ROWS, "model=folder", f"model.path={base}", "recipe=lora", "training.max_steps=9")
    whole, killed = killed_and_resumed(zygote, tmp_path, tmp_path, *command, at=[random.randrange(1, 9)])
    same_ending(whole, killed)
    assert result(whole)["final_metrics"]["eval_loss"] < result(whole)["start_metrics"]["eval_loss"]
    zygote.run(tmp_path, f"run={killed}", "weights=both", module="app.evaluate", code=0)
    zygote.run(tmp_path, f"run={killed}", "prompt=Hello", "max_new_tokens=4", module="app.generate", code=0)

    # a fresh process compares both with the run's model, by the class that config.json names
    zygote.run(tmp_path, f"run={killed}", "kind=adapter", "to=adapter", module="app.export", code=0)
    adapted = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert all("language_model" in name for name in adapted)
    zygote.run(tmp_path, f"run={killed}", "kind=merged", "dtype=fp32", "to=merged", module="app.export", code=0)
    before, after = (load_file(place / "model.safetensors") for place in (base, tmp_path / "merged"))
    assert before.keys() == after.keys()
    changed = [name for name in before if not before[name].equal(after[name])]
    assert len(changed) == len(adapted)
    assert all("language_model" in name and "_proj" in name for name in changed)
    copied = "preprocessor_config.json"
    assert (tmp_path / "merged" / copied).read_bytes() == (base / copied).read_bytes()
    configs = [json.loads((place / "config.json").read_text()) for place in (base, tmp_path / "merged")]
    assert configs[0]["architectures"] == configs[1]["architectures"] == [configs[0]["architectures"][0]]
    words = (f"run={killed}", "kind=quantized", "quant=int8", "to=quantized")
    zygote.run(tmp_path, *words, module="app.export", code=0)
