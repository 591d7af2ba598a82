"""Experts of mixtures: adapters on their stacks, and stacks in fewer bits, against PEFT's own forward."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from app.config.schema import ModelConfig, QuantizationConfig
from app.errors import ConfigError
from app.finished.inference import load_tuned
from app.layers import experts
from app.layers.experts import expert_modules, stack_shapes
from app.layers.quantization import quantizer_of
from app.model.training_model import TrainingModel
from tests.model.small import (
    CAUSAL,
    build_model,
    built,
    distance,
    documents_of,
    lora,
    model_config,
    outcome,
    packed,
    sections,
    training_model_of,
    wide_numbers,
)

BATCH = packed(documents_of((19, 7, 12)))
SIZES = {"moe_intermediate_size": 64, "initializer_range": 0.05}


def config_of(kind: str, **given: Any) -> ModelConfig:
    return model_config(kind, architecture=wide_numbers(kind, **SIZES), **given)


def four_bits(base: str) -> QuantizationConfig:
    return QuantizationConfig(kind=base, double_quant=True)


def trained(kind: str, base: str = "none", **given: Any) -> TrainingModel:
    """A model with adapters on attention and experts, its base in fewer bits."""
    adapter = lora(experts=True, **given.pop("adapter", {}))
    model = given.pop("model", None) or config_of(kind)
    return training_model_of(kind, adapter, quantization=four_bits(base), model=model, **given)


def by_peft(kind: str, base: str) -> TrainingModel:
    """The same model by PEFT's own forward, on plain weights that are rounded as the base of `trained` is."""
    with patch.object(experts, "_EXACT", -1.0):  # our function is not used
        model, quantizer = trained(kind), quantizer_of(four_bits(base), torch.float32)
    inside = f"base_model.model.{model.language_model.base_model_prefix}."
    if quantizer is None:
        return model
    for name, module in model.network.named_modules():
        is_base = type(module) is nn.Linear and ".lora_" not in name and name.startswith(inside)
        for stack in ["weight"] if is_base else stack_shapes(module) if hasattr(module, "is_transposed") else ():
            weight: Any = module._parameters[stack]
            weight.data = quantizer.rounded(weight.data.flatten(0, -2)).view_as(weight)
    return model


@pytest.mark.parametrize(
    ("kind", "base", "recompute"),
    [
        ("qwen3_moe", "none", True),
        ("mixtral", "nf4", False),
        ("gpt_oss", "none", False),
        ("gpt_oss", "nf4", True),
        ("qwen3_moe", "int8", True),
        ("mixtral", "fp4", False),
    ],
)
def test_experts_gradients_equal_those_of_peft(kind: str, base: str, recompute: bool) -> None:
    ours, theirs = trained(kind, base, recompute=recompute), by_peft(kind, base)
    (loss, found), (own_loss, own) = outcome(ours, BATCH), outcome(theirs, BATCH)
    assert loss == pytest.approx(own_loss, rel=1e-6)
    assert distance(found, own) <= 1e-6
    assert max(distance(found[name], own[name]) for name in own) <= 1e-5
    assert ["experts" in each.what for each in ours.grouped_experts] == [True]
    assert ours.remarks() == []
    of_b = [each for name, each in found.items() if ".experts." in name and ".lora_B." in name]
    assert len(of_b) == 4
    assert all(each.view(len(each), -1, 4).any(0).any(0).all() for each in of_b), "an expert without a gradient"


def test_adapter_of_experts_drawn_as_peft_draws() -> None:
    from peft import LoraConfig, get_peft_model

    parts = sections(config_of("qwen3_moe"), lora(experts=True))
    ours = build_model(parts, torch.device("cpu"), 0, "base").trained()
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lm = training_model_of("qwen3_moe", model=parts.model).language_model
    torch.manual_seed(0)
    network = get_peft_model(lm, LoraConfig(r=4, target_modules=attention, target_parameters=targets))
    theirs = {name: each for name, each in network.named_parameters() if each.requires_grad}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], each) for name, each in theirs.items())


@pytest.mark.parametrize(("kind", "base"), [("mixtral", "none"), ("gpt_oss", "nf4")])
def test_adapter_of_experts_loaded_by_peft_and_by_us(kind: str, base: str, tmp_path: Path) -> None:
    from peft import PeftModel

    lm = built(kind, "eager", **wide_numbers(kind, **SIZES))
    lm.save_pretrained(tmp_path / "base")
    config = config_of(kind, path=str(tmp_path / "base"))
    model = trained(kind, base, model=config)
    network: Any = model.network
    network.peft_config["default"].base_model_name_or_path = config.path
    network.save_pretrained(str(tmp_path / "run" / "final"), save_embedding_layers=False)
    with torch.no_grad():
        expected = model.eval().language_model(BATCH.ids, use_cache=False).logits
    again = load_tuned(tmp_path / "run", config, CAUSAL, adapter=True, quantization=four_bits(base))
    assert distance(again(BATCH.ids, use_cache=False).logits, expected) <= 1e-6
    if base == "none":
        plain = PeftModel.from_pretrained(lm, str(tmp_path / "run" / "final"))
        assert distance(plain(BATCH.ids, use_cache=False).logits, expected) <= 1e-6


@pytest.mark.parametrize("base", ["nf4", "fp4", "int8"])
def test_packed_stack_is_as_near_as_a_layer(base: str) -> None:
    quantizer = quantizer_of(four_bits(base), torch.float32)
    assert quantizer is not None
    lm = built("qwen3_moe", **wide_numbers("qwen3_moe", **SIZES))
    before = {name: each.detach().clone() for name, each in lm.named_parameters() if each.ndim == 3}
    quantizer.quantize(lm)
    for place, each in expert_modules(lm).items():
        for name, shape in stack_shapes(each).items():
            whole, packed_layer = before[f"{place}.{name}"], each.packed[name]
            found = quantizer.unpacked(packed_layer, torch.float32).view(shape)
            assert torch.equal(found, quantizer.rounded(whole.flatten(0, 1)).view(shape))
            assert distance(found, whole) < {"nf4": 0.1, "fp4": 0.13, "int8": 0.01}[base]
            assert packed_layer.weight.nbytes == whole.numel() * (1 if base == "int8" else 0.5)


def test_experts_that_differ_are_left_to_peft_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_EXACT", -1.0)
    model = trained("mixtral")
    (remark,) = model.remarks()
    assert "as the model and PEFT do, which is slower: 4 experts of 64 inputs, grouped" in remark
    assert model.language_model.config._experts_implementation != experts.NAME
    with pytest.raises(Exception, match=r"^quantization\.kind=nf4: 4 experts .* Set recipe=lora"):
        trained("mixtral", "nf4")


def test_experts_of_dense_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^adapter\.experts=true: a model of kind llama has no stacks of experts"):
        training_model_of("llama", lora(experts=True))
