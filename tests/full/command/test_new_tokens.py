"""A vocabulary that is resized for new tokens: trained, loaded and exported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from app.assets import ROOT
from tests.command.test_new_tokens import SHIPPED, place
from tests.harness.runs import Zygote, losses, metrics, result
from tests.model.small import distance

__all__ = ["place"]
ADAPTER = ("adapter.train_tokens=new", "eval.at_start=true")
WORDS = (*SHIPPED, "training.max_steps=4", "checkpoint.every=2", "record.every=1")
IDS = torch.tensor([[5, 1536, 70, 1537, 9]])
PLANNED = 64 << 10  # bytes; of trained rows and their copies pieces are counted apart


def test_adapter_of_a_resized_base_loads_and_goes_on(place: Path, quick_zygote: Zygote) -> None:
    words, whole = (*WORDS, *ADAPTER, "recipe=lora"), place / "whole"
    quick_zygote.finish(place, *words, "output_dir=whole")
    as_planned(whole)
    same_losses_on_a_folder_of_transformers(place, quick_zygote, *words)

    quick_zygote.finish(place, "run=whole", "kind=merged", "dtype=fp32", "to=merged", module="app.export")
    assert json.loads((place / "merged" / "export.json").read_text())["passed"]
    merged = AutoModelForCausalLM.from_pretrained(place / "merged")
    assert distance(logits(merged), logits(loaded_as_the_card_says(whole / "final"))) <= 1e-5

    quick_zygote.finish(place, *words, "adapter.start=whole", "training.max_steps=1", "output_dir=second")
    begun = metrics(place / "second")[0]["eval_loss"]
    assert begun == pytest.approx(result(whole)["eval_loss"], rel=1e-6)
    other = [word for word in words if not word.startswith(("model.add_tokens", "adapter.train_tokens"))]
    message = 'Set model.add_tokens=["<call>", "</call>"] adapter.train_tokens=new.'
    quick_zygote.refused(place, *other, "adapter.start=whole", "output_dir=third", message=message)


def test_adapter_of_a_resized_quantized_base_is_verified(place: Path, quick_zygote: Zygote) -> None:
    quick_zygote.finish(place, *WORDS, *ADAPTER, "recipe=qlora", "output_dir=whole")
    as_planned(place / "whole")
    exported = quick_zygote.finish(place, "run=whole", "kind=adapter", "to=adapter", module="app.export")
    assert "passed: the reloaded model differs by" in exported.stdout
    assert "refuses a resized vocabulary (1600 rows)" in exported.stdout


def test_resized_base_is_trained_whole(place: Path, zygote: Zygote) -> None:
    words = (*WORDS, "recipe=full")
    zygote.finish(place, *words, "output_dir=whole")
    as_planned(place / "whole")
    same_losses_on_a_folder_of_transformers(place, zygote, *words)
    assert logits(loaded_as_the_card_says(place / "whole" / "final")).isfinite().all()


def as_planned(run: Path) -> None:
    counted = result(run)
    assert abs(counted["memory_predicted_bytes"] - counted["memory_measured_bytes"]) <= PLANNED


def same_losses_on_a_folder_of_transformers(place: Path, zygote: Zygote, *words: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(ROOT / "tiny", dtype=torch.float32)
    base.resize_token_embeddings(1600)
    for layer in (base.get_input_embeddings(), base.get_output_embeddings()):
        layer.weight.data[1536:] = layer.weight.data[:1536].mean(0)
    base.save_pretrained(place / "resized")
    AutoTokenizer.from_pretrained(ROOT / "tiny").save_pretrained(place / "resized")
    ended = zygote.finish(place, *words, "model.path=resized", "output_dir=plain")
    assert "model.vocab_size=" not in ended.stdout
    assert losses(place / "whole") == pytest.approx(losses(place / "plain"), rel=1e-5)


@torch.no_grad()
def logits(lm: Any) -> torch.Tensor:
    found: torch.Tensor = lm(input_ids=IDS).logits
    return found[..., :1538]  # rows of no token are drawn by transformers


def loaded_as_the_card_says(final: Path) -> Any:
    code = (final / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    known: dict[str, Any] = {}
    exec(code.replace('"."', repr(str(final))).replace('"asset:tiny"', repr(str(ROOT / "tiny"))), known)
    assert len(known["tokenizer"]) == 1538
    return known["model"]


def test_vocabulary_without_unused_rows_is_resized(place: Path, zygote: Zygote) -> None:
    words = ("recipe=lora", "adapter.train_tokens=new", "training.max_steps=2", "output_dir=run")
    ended = zygote.finish(place, *SHIPPED, *words)
    assert "note    model.vocab_size=1600: the base has 1536 rows; new rows start as their mean" in ended.stdout
    assert "first call base.resize_token_embeddings(1600) (see final/README.md)" in ended.stdout
    assert yaml.safe_load((place / "run" / "run.yaml").read_text())["model"]["vocab_size"] == 1600
    assert "base.resize_token_embeddings(1600)  # rows" in (place / "run" / "final" / "README.md").read_text()
