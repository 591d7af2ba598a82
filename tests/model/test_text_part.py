"""The text part of a model that reads more than text: exact, and an adapter and a merged model of the whole."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

from app.exports.reload import in_fp32
from app.model.build import build_training_model
from app.model.load_run import load_tuned
from app.model.merge import merged_config, plan_merge, read_updates
from app.model.save import save_model
from app.model.structure import BaseModel
from app.model.tokenizer import load_tokenizer
from tests.model.small import CAUSAL, documents_of, lora, model_config, sections, three_steps, wide_numbers
from tests.model.test_quantization import NF4

CPU = torch.device("cpu")
IDS = documents_of((10,))[0][None]
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
IMAGES: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 4, "boi_token_index": 60, "eoi_token_index": 61, "image_token_index": 62},
    "mistral3": {"image_token_index": 62},
}
TEXT = {"gemma3": "gemma3_text", "mistral3": "mistral"}
TOWERS = {"gemma3": "siglip_vision_model", "mistral3": "pixtral"}


@pytest.fixture(params=TEXT)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny model with a tower for images."""
    kind: str = request.param
    tower = {**TOWER, "model_type": TOWERS[kind], "image_size": 28, "patch_size": 14}
    numbers = transformers.AutoConfig.for_model(
        kind, text_config=wide_numbers(TEXT[kind]), vision_config=tower, **IMAGES[kind]
    )
    torch.manual_seed(0)
    whole = transformers.AutoModelForImageTextToText.from_config(numbers)
    for parameter in whole.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    whole.save_pretrained(str(tmp_path / "base"))
    return tmp_path / "base"


def whole_of(folder: Path, **given: Any) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(str(folder), dtype=torch.float32, **given).eval()


@torch.no_grad()
def logits(lm: Any) -> Tensor:
    found: Tensor = lm(input_ids=IDS).logits
    return found.float()


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_text_part_trained_and_loaded_as_its_whole(folder: Path, tmp_path: Path) -> None:
    """The adapter is loaded by plain PEFT, the merged model by plain transformers, and by us."""
    config, tokenizer = model_config(path=str(folder)), load_tokenizer(model_config(), needs_template=True)
    parts = sections(config, lora(targets=["all-linear"]))
    model = build_training_model(parts, CPU, 0, str(folder))
    (remark,) = (each for each in model.remarks() if "text part" in each)
    assert type(whole_of(folder)).__name__ in remark
    assert relative(logits(model.language_model), logits(whole_of(folder))) < 1e-5
    three_steps(model)
    tuned = logits(model.eval().language_model)
    assert relative(tuned, logits(whole_of(folder))) > 1e-2, "the adapter does something"

    base, final = BaseModel(config, CAUSAL), tmp_path / "run" / "final"
    save_model(model, tokenizer, final, text_part=base.text_part)
    theirs = PeftModel.from_pretrained(whole_of(folder), str(final)).eval()
    assert relative(logits(theirs), tuned) < 1e-5
    assert not [name for name, _ in theirs.named_parameters() if "vision" in name and "lora" in name]
    assert relative(logits(load_tuned(tmp_path / "run", config, CAUSAL, adapter=True)), tuned) < 1e-5

    merged = tmp_path / "merged"
    merged.mkdir()
    (merged / "config.json").write_text(json.dumps(merged_config(folder, "fp32")))
    plan_merge(parts, read_updates(final), "fp32", CPU, final).write(merged, 1e9)
    assert relative(logits(whole_of(merged)), tuned) < 1e-5
    stored, before = (load_file(place / "model.safetensors") for place in (merged, folder))
    assert stored.keys() == before.keys()
    changed = {name for name in stored if not stored[name].equal(before[name])}
    assert changed
    assert all("language_model" in name and "_proj" in name for name in changed)


def test_text_part_in_nf4_is_that_of_the_whole_in_nf4(folder: Path) -> None:
    config = model_config(path=str(folder))
    parts = sections(config, lora(), quantization=NF4)
    model = build_training_model(parts, CPU, 0, str(folder))
    packed = transformers.BitsAndBytesConfig(**parts.bitsandbytes_arguments(BaseModel(config, CAUSAL)) or {})
    theirs = whole_of(folder, quantization_config=packed)
    in_fp32(theirs)  # or CPUs with bf16 would compute in that
    assert relative(logits(model.language_model), logits(theirs)) < 1e-5
    assert {type(each).__name__ for name, each in theirs.named_modules() if "vision" in name}.isdisjoint({"Linear4bit"})
