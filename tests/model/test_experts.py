"""Mixture of experts: adapters on stacks, quantized stacks, and the routers' load-balancing loss."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from app.batch import IGNORE
from app.config.load import compose_run
from app.config.schema import AdapterConfig, ModelConfig, QuantizationConfig, TaskConfig
from app.errors import ConfigError
from app.finished.inference import load_tuned
from app.layers import experts
from app.layers.experts import coefficient_of, expert_modules, rounded_stack, stack_shapes
from app.layers.quantization import quantizer_of
from app.model.training_model import TrainingModel
from app.oom_retry import split_batch
from tests.model.small import (
    CAUSAL,
    batch_of,
    build_model,
    built,
    distance,
    documents_of,
    full,
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
    if quantizer is None:
        return model
    inside = f"base_model.model.{model.language_model.base_model_prefix}." if quantizer.layers(built(kind)) else None
    for name, module in model.network.named_modules():
        if inside and type(module) is nn.Linear and ".lora_" not in name and name.startswith(inside):
            module.weight.data = quantizer.rounded(module.weight.data)
        for stack in stack_shapes(module) if hasattr(module, "is_transposed") else ():
            weight: Any = module._parameters[stack]
            weight.data = rounded_stack(quantizer, weight.data, is_transposed=bool(module.is_transposed))
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
        ("gpt_oss", "mxfp4", True),
        ("mixtral", "mxfp4", False),
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
    assert "of the model and PEFT, which is slower: 4 experts of 64 inputs, grouped" in remark
    assert model.language_model.config._experts_implementation != experts.NAME
    with pytest.raises(Exception, match=r"^quantization\.kind=nf4: 4 experts .* Set recipe=lora"):
        trained("mixtral", "nf4")


def test_experts_of_dense_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^adapter\.experts=true: a model of kind llama has no stacked experts"):
        training_model_of("llama", lora(experts=True))


DOCUMENTS = documents_of((19, 7, 12))


def routed(kind: str, coefficient: float | str = 0.5, adapter: AdapterConfig | None = None, **given: Any) -> Any:
    return training_model_of(kind, adapter, task=TaskConfig(kind="causal", router_loss=coefficient), **given)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "qwen3_moe"])
def test_router_loss_of_one_document_is_that_of_transformers(kind: str) -> None:
    model, batch = routed(kind), batch_of(DOCUMENTS[:1])
    lm = model.language_model
    with torch.no_grad():
        loss, count = model(batch)
        logits = lm.base_model(batch.ids, output_router_logits=True).router_logits
        plain, _ = routed(kind, 0.0)(batch)
    expected = load_balancing_loss_func(logits, logits[0].shape[-1], lm.config.num_experts_per_tok)
    assert float(model.router_loss.sum) == pytest.approx(count * float(expected), rel=1e-6)
    assert float(loss) == pytest.approx(float(plain) + 0.5 * count * float(expected), rel=1e-6)


@pytest.mark.parametrize(("kind", "recompute"), [("mixtral", True), ("gpt_oss", False)])
def test_router_loss_does_not_depend_on_the_layout_of_rows(kind: str, recompute: bool) -> None:
    model, plain = routed(kind, recompute=recompute), routed(kind, 0.0)

    def summed(model: Any, batches: Any) -> Any:
        return outcome(model, lambda: sum(model(batch)[0] for batch in batches))

    each = [batch_of([document], labels_from=3) for document in DOCUMENTS]
    loss, found = summed(model, each)
    unlike = summed(plain, each)
    assert abs(loss - unlike[0]) > 1.0
    routers = [name for name in found if name.endswith((".gate.weight", ".router.weight"))]
    assert routers
    assert all(distance(found[name], unlike[1][name]) > 1e-3 for name in routers)
    for batch in (packed(DOCUMENTS, labels_from=3, filling=5), batch_of(DOCUMENTS, labels_from=3, fill=2)):
        for parts in ([batch], split_batch(batch, 1)):
            again, gradients = summed(model, parts)
            assert again == pytest.approx(loss, rel=1e-6)
            assert distance(gradients, found) <= 1e-6


@pytest.mark.parametrize("layout", [packed, batch_of])
def test_router_loss_of_a_micro_batch_without_rows_is_none(layout: Any) -> None:
    """Such ones fill up the last step of an epoch."""
    batch = layout(DOCUMENTS)
    no_labels = torch.full_like(batch.targets, IGNORE)
    model = routed("mixtral")
    loss, _ = model(replace(batch, lengths=(), targets=no_labels))
    assert float(loss.detach()) == float(model.router_loss.sum) == 0.0


def test_router_loss_is_summed_in_fp32_under_autocast() -> None:
    model = routed("mixtral")
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = model(packed(DOCUMENTS))
    assert loss.dtype == model.router_loss.sum.dtype == torch.float32


def test_router_loss_is_not_in_scores() -> None:
    batch = packed(DOCUMENTS)
    assert distance(routed("mixtral").scores(batch)[0], routed("mixtral", 0.0).scores(batch)[0]) == 0.0


@pytest.mark.parametrize(
    ("kind", "adapter", "expected"),
    [
        ("mixtral", full(), 0.001),
        ("mixtral", lora(experts=True), 0.001),
        ("mixtral", lora(), 0.0),
        ("llama", full(), 0.0),
        ("deepseek_v3", full(), 0.0),
    ],
)
def test_router_loss_auto_is_that_of_config_where_experts_train(
    kind: str, adapter: AdapterConfig, expected: float
) -> None:
    task, lm = compose_run(["recipe=lora"]).task, built(kind)
    assert task.router_loss == "auto"
    assert coefficient_of(task, adapter, lm) == expected
    if expected:
        lm.config.router_aux_loss_coef = 0.9  # of gpt-oss
        assert coefficient_of(task, adapter, lm) == 0.01
    remarks = routed(kind, "auto", adapter).remarks()
    assert ("task.router_loss=auto: 0.001 (from config.json, at most 0.01)" in remarks) == bool(expected)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_router_loss_of_model_without_one_is_refused(kind: str) -> None:
    lm: nn.Module = built(kind)
    with pytest.raises(ConfigError, match=rf"^task\.router_loss=0\.1: a model of kind {kind} has no router"):
        coefficient_of(TaskConfig(kind="causal", router_loss=0.1), full(), lm)
