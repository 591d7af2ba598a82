"""The text part of a model that reads more than text: exact, and an adapter and a merged model of the whole."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

from app.adapters.merged_weights import read_updates
from app.base.base_model import BaseModel
from app.base.tokenizer import load_tokenizer
from app.config.schema import AdapterConfig
from app.errors import ConfigError
from app.exports.reload import in_fp32
from app.finished.inference import load_tuned
from app.finished.save import merged_config, plan_merge, save_model, write_config
from app.model.build import count_weights
from app.training.initial_model import load_start
from tests.harness.composed import composed
from tests.model.small import CAUSAL, build_model, documents_of, full, lora, model_config, sections, three_steps
from tests.model.test_quantization import NF4
from tests.model.wholes import WHOLES, saved_whole

CPU = torch.device("cpu")
IDS = documents_of((10,))[0][None]


@pytest.fixture(params=WHOLES, scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tower for images."""
    base = tmp_path_factory.mktemp("whole") / "base"
    saved_whole(transformers.AutoConfig.for_model(request.param, **WHOLES[request.param]), base)
    return base


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
    model = build_model(parts, CPU, 0, str(folder))
    (remark,) = (each for each in model.remarks() if "text part" in each)
    whole = whole_of(folder)
    assert type(whole).__name__ in remark
    untuned = logits(whole)
    assert relative(logits(model.language_model), untuned) < 1e-5
    three_steps(model)
    tuned = logits(model.eval().language_model)
    assert relative(tuned, untuned) > 1e-2, "the adapter does something"

    base, final = BaseModel(config, CAUSAL), tmp_path / "run" / "final"
    save_model(model, tokenizer, final, names=base.names)
    theirs = PeftModel.from_pretrained(whole, str(final)).eval()
    assert relative(logits(theirs), tuned) < 1e-5
    assert not [name for name, _ in theirs.named_parameters() if "vis" in name and "lora" in name]

    gone_on = build_model(parts, CPU, 0, str(folder))
    run = replace(composed("recipe=lora"), adapter=lora(targets=["all-linear"], start=str(final)))
    load_start(run, gone_on, None, base.names)
    assert torch.equal(logits(gone_on.eval().language_model), tuned)
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

    alone = tmp_path / "alone"
    alone.mkdir()
    planned = partial(plan_merge, parts, read_updates(final), "fp32", CPU, final, text_alone=True)
    if type(base.on_meta()) is type(whole):
        with pytest.raises(ConfigError, match=r"^names=text: transformers has no class for its text part"):
            planned()
        return
    planned().write(alone, 1e9)
    write_config(base.on_meta(), torch.float32, alone)
    again = transformers.AutoModelForCausalLM.from_pretrained(str(alone), dtype=torch.float32).eval()
    assert type(again) is type(base.on_meta())
    assert relative(logits(again), tuned) < 1e-5


def test_text_part_in_nf4_is_that_of_the_whole_in_nf4(folder: Path) -> None:
    config = model_config(path=str(folder))
    parts = sections(config, lora(), quantization=NF4)
    model = build_model(parts, CPU, 0, str(folder))
    packed = transformers.BitsAndBytesConfig(**parts.bitsandbytes_arguments(BaseModel(config, CAUSAL)) or {})
    theirs = whole_of(folder, quantization_config=packed)
    in_fp32(theirs)  # or CPUs with bf16 would compute in that
    assert relative(logits(model.language_model), logits(theirs)) < 1e-5
    assert {type(each).__name__ for name, each in theirs.named_modules() if "vis" in name}.isdisjoint({"Linear4bit"})


def test_all_weights_of_a_part_without_a_class_are_refused() -> None:
    architecture = {"model_type": "qwen3_vl", **WHOLES["qwen3_vl"]}
    config = model_config(architecture=architecture)
    assert count_weights(sections(config, lora())).trained
    with pytest.raises(ConfigError, match=r"^adapter.kind=none: .* kind qwen3_vl .* Set recipe=lora\.$"):
        count_weights(sections(config, full()))


def test_other_adapters_of_a_text_part_are_refused(folder: Path) -> None:
    config = model_config(path=str(folder))
    with pytest.raises(ConfigError, match=r"^adapter.kind=peft: .* only LoRA adapters .*\. Set adapter=lora\.$"):
        count_weights(sections(config, AdapterConfig(kind="peft", method="OFT")))
