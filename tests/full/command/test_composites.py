"""Runs of models that read more than text: scored, asked, and exported as parts of the whole."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file

from app.base.base_model import BaseModel
from app.base.tokenizer import load_tokenizer
from app.config.schema import QuantizationConfig
from app.finished.inference import load_tuned
from app.finished.save import save_tokenizer
from app.layers.quantization import quantizer_of
from tests.harness.runs import SMALL, Zygote, metrics, result
from tests.model.small import CAUSAL, built, distance, model_config, wide_numbers
from tests.model.test_conversion import changed, in_mxfp4
from tests.model.wholes import WHOLES, saved_whole

_NF4 = QuantizationConfig(kind="nf4", double_quant=True)
_IDS = torch.randint(5, 300, (1, 12), generator=torch.Generator().manual_seed(0))
_ROWS = tuple(word for word in SMALL if not word.startswith("model."))


def composite(kind: str, folder: Path) -> Path:
    """With the tokenizer that ships, and a file of a processor."""
    tokenizer = load_tokenizer(model_config(), needs_template=True)
    given = dict(WHOLES[kind])
    given["text_config"] = given["text_config"] | {"vocab_size": len(tokenizer), "max_position_embeddings": 128}
    saved_whole(transformers.AutoConfig.for_model(kind, **given), folder)
    save_tokenizer(tokenizer, folder)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "SiglipImageProcessor"}')
    return folder


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_run_is_scored_asked_and_exported_as_its_whole(kind: str, quick_zygote: Zygote, tmp_path: Path) -> None:
    base = composite(kind, tmp_path / "base")
    command = (*_ROWS, "model=folder", f"model.path={base}", "recipe=lora", "training.max_steps=9")
    command += ("adapter.rank_pattern={self_attn.q_proj:4,q_proj:8}",)  # names that the longest one decides
    run = tmp_path / "run"
    quick_zygote.run(tmp_path, *command, f"output_dir={run}", code=0)
    assert result(run)["final_metrics"]["eval_loss"] < result(run)["start_metrics"]["eval_loss"]
    quick_zygote.run(tmp_path, f"run={run}", "weights=both", module="app.evaluate", code=0)
    quick_zygote.run(tmp_path, f"run={run}", "prompt=Hello", "max_new_tokens=4", module="app.generate", code=0)

    # a fresh process compares both with the run's model, by the class that config.json names
    quick_zygote.run(tmp_path, f"run={run}", "kind=adapter", "to=adapter", module="app.export", code=0)
    adapted = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert all("language_model" in name for name in adapted)
    quick_zygote.run(tmp_path, f"run={run}", "kind=merged", "dtype=fp32", "to=merged", module="app.export", code=0)
    before, after = (load_file(place / "model.safetensors") for place in (base, tmp_path / "merged"))
    assert before.keys() == after.keys()
    changed = [name for name in before if not before[name].equal(after[name])]
    assert len(changed) == len(adapted)
    assert all("language_model" in name and "_proj" in name for name in changed)
    copied = "preprocessor_config.json"
    assert (tmp_path / "merged" / copied).read_bytes() == (base / copied).read_bytes()
    configs = [json.loads((place / "config.json").read_text()) for place in (base, tmp_path / "merged")]
    assert configs[0]["architectures"] == configs[1]["architectures"] == [configs[0]["architectures"][0]]
    for quant in ("int8", "fp8"):
        words = (f"run={run}", "kind=quantized", f"quant={quant}", f"to={quant}")
        quick_zygote.run(tmp_path, *words, module="app.export", code=0)
    ignored = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]["ignore"]
    assert any("vision" in name or "visual" in name for name in ignored)
    assert not any("language_model" in name and "_proj" in name for name in ignored)
    if kind == "gemma3":
        start = ("adapter.start=run", "eval.at_start=true", "training.max_steps=1", "output_dir=further")
        further = [word for word in command if not word.startswith("adapter.rank_pattern")]
        quick_zygote.run(tmp_path, *further, *start, code=0)
        assert metrics(tmp_path / "further")[0]["eval_loss"] == pytest.approx(
            result(run)["final_metrics"]["eval_loss"], rel=1e-6
        )
        alone = (f"run={run}", "kind=merged", "names=text", "dtype=fp32", "to=text")
        quick_zygote.run(tmp_path, *alone, module="app.export", code=0)
        numbers = json.loads((tmp_path / "text" / "config.json").read_text())
        assert (numbers["model_type"], numbers["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
        assert not (tmp_path / "text" / copied).exists()


def mixture(kind: str, folder: Path) -> Path:
    """A composite with experts, or a mixture in MXFP4."""
    tokenizer = load_tokenizer(model_config(), needs_template=True)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 128}
    if kind == "qwen3_5_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64}
        text = wide_numbers("qwen3_5_text", moe_intermediate_size=64, **experts, **sizes)
        given = {**WHOLES["qwen3_5"], "text_config": text | {"model_type": "qwen3_5_moe_text"}}
        saved_whole(transformers.AutoConfig.for_model(kind, **given), folder)
    else:
        built(kind, "eager", **wide_numbers(kind, **sizes)).save_pretrained(str(folder))
        changed(folder, in_mxfp4, quantization_config={"quant_method": "mxfp4"})
    save_tokenizer(tokenizer, folder)
    return folder


@torch.no_grad()
def _logits_by_plain_peft(base: BaseModel, final: Path) -> torch.Tensor:
    """Of the class that config.json names, its base rounded as the run packed it."""
    place, quantizer = base.config.path, quantizer_of(_NF4, torch.float32)
    assert quantizer is not None
    given = {} if base.unpacked_format is None else {"quantization_config": transformers.Mxfp4Config(dequantize=True)}
    lm = getattr(transformers, base.auto_class).from_pretrained(place, dtype=torch.float32, **given)
    for name, module in lm.named_modules():
        if type(module) is torch.nn.Linear and name not in base.linear_outside:
            module.weight.copy_(quantizer.rounded(module.weight))
    for name in base.stacks_of_experts:
        stack = lm.get_parameter(name)
        stack.copy_(quantizer.rounded(stack.flatten(0, 1)).view_as(stack))
    logits: torch.Tensor = PeftModel.from_pretrained(lm, str(final)).eval()(input_ids=_IDS, use_cache=False).logits
    return logits


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "gpt_oss"])
def test_run_of_packed_experts_is_loaded_by_plain_peft(kind: str, quick_zygote: Zygote, tmp_path: Path) -> None:
    path = mixture(kind, tmp_path / "base")
    words = ("recipe=qlora", "adapter.experts=true", "adapter.r=4", "task.router_loss=0.01", "training.max_steps=4")
    few = tuple(word for word in _ROWS if not word.startswith(("eval.", "dataset.max_rows", "checkpoint.every")))
    few += ("dataset.max_rows=30", "eval.every=0", "eval.samples=0", "checkpoint.every=1")
    command = (*few, "model=folder", f"model.path={path}", *words)
    run = tmp_path / "run"
    quick_zygote.run(tmp_path, *command, f"output_dir={run}", code=0)
    assert result(run)["experts"] == {"total": 8, "untrained": 0}
    lines = metrics(run)
    assert all(2 < each["router_loss"] < 8 for each in lines if "loss" in each)  # of 2 experts of 4: 2 if all alike
    assert all("router_loss" not in each for each in lines if "eval_loss" in each)

    base = BaseModel(model_config(path=str(path)), CAUSAL)
    lm = load_tuned(run, base.config, CAUSAL, adapter=True, quantization=_NF4)
    with torch.no_grad():
        expected = lm(input_ids=_IDS, use_cache=False).logits
    assert distance(_logits_by_plain_peft(base, run / "final"), expected) < 1e-5
    export = (f"run={run}", "kind=merged", "dtype=fp32", "to=merged")
    quick_zygote.run(tmp_path, *export, module="app.export", code=0)
    if kind == "qwen3_5_moe":
        _check_compressed(quick_zygote, tmp_path, run)


def _check_compressed(zygote: Zygote, folder: Path, run: Path) -> None:
    """Transformers reads experts next to fp8, but any rounding changes the choice of these random routers."""
    zygote.run(folder, f"run={run}", "kind=quantized", "quant=fp8", "to=fp8", module="app.export")
    found = json.loads((folder / "fp8" / "export.json").read_text())
    assert found["failure"] is None
    assert found["kl"] < 0.3
    message = "transformers does not read unquantized experts (model.language_model.layers.0.mlp.experts.0."
    zygote.refused(
        folder, f"run={run}", "kind=quantized", "quant=w8a8", "to=w8a8", module="app.export", message=message
    )
