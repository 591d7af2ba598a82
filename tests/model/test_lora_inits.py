"""What LoRA begins with by EVA, CorDA and LoftQ, against the definitions and PEFT's own preparation."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.config import CordaConfig
from torch import Tensor

from app.adapters import lora_inits
from app.batch import Batch
from app.config.schema import QuantizationConfig
from app.layers.quantization import weight_of
from app.model.build import build_base
from app.model.training_model import TrainingModel
from tests.model.small import (
    batch_of,
    build_model,
    distance,
    documents_of,
    lora,
    model_config,
    numbers,
    packed,
    sections,
    wide_numbers,
)

CPU = torch.device("cpu")
DOCUMENTS = documents_of((30, 60, 20))


def begun(init: str, kind: str, rows: list[Batch], **given: Any) -> TrainingModel:
    """A model of `kind` as `init` begins it, in eval mode."""
    architecture = (wide_numbers if given else numbers)(kind)
    parts = sections(model_config(kind, architecture=architecture), lora(init=init), **given)
    return build_model(parts, CPU, 0, "base", rows=lambda: rows).eval()


def layers_of(model: TrainingModel) -> dict[str, Any]:
    found = {name: each for name, each in model.network.named_modules() if hasattr(each, "lora_A")}
    return {name.removeprefix("base_model.model."): each for name, each in found.items()}


def update_of(layer: Any) -> Tensor:
    result: Tensor = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    return result.detach()


@torch.no_grad()
def inputs_of(kind: str, documents: list[Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """The base, and what its layers get of each document by itself."""
    lm = build_base(sections(model_config(kind), lora()), CPU, 0).eval()
    found: dict[str, list[Tensor]] = {}
    for name, module in lm.named_modules():
        module.register_forward_pre_hook(lambda _m, args, name=name: found.setdefault(name, []).extend(args[:1]))
    for document in documents:
        lm(input_ids=document[None], use_cache=False)
    rows = {name: each for name, each in found.items() if each and isinstance(each[0], Tensor) and each[0].ndim == 3}
    return lm, {name: torch.cat([each[0] for each in tensors]) for name, tensors in rows.items()}


@pytest.mark.parametrize(("kind", "batch"), [("llama", packed(DOCUMENTS, filling=40)), ("gpt2", batch_of(DOCUMENTS))])
def test_eva_begins_with_leading_right_singular_vectors_of_real_inputs(
    monkeypatch: pytest.MonkeyPatch, kind: str, batch: Batch
) -> None:
    monkeypatch.setattr(lora_inits, "MAX_MOMENT_BYTES", 3 * 4 * 32**2)  # so that the rows are read several times
    model = begun("eva", kind, [batch])
    lm, inputs = inputs_of(kind, DOCUMENTS)
    assert any("adapter.init=eva: from the inputs of 110 tokens" in each for each in model.remarks())
    assert len(layers_of(model)) >= 8
    for name, layer in layers_of(model).items():
        a = layer.lora_A["default"].weight.detach()
        best = torch.linalg.svdvals(inputs[name])[: len(a)].square().sum()
        assert distance(a @ a.T, torch.eye(len(a))) <= 1e-5
        assert (inputs[name] @ a.T).square().sum() == pytest.approx(float(best), rel=1e-5)
        assert not layer.lora_B["default"].weight.any()
        assert torch.equal(layer.get_base_layer().weight, lm.get_submodule(name).weight)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_corda_splits_the_base_as_peft_does(kind: str) -> None:
    from peft.tuners.lora.corda import preprocess_corda

    (document,) = documents_of((60,))
    model = begun("corda", kind, [packed([document])])
    lm, _ = inputs_of(kind, [])
    targets = sorted({name.rpartition(".")[2] for name in layers_of(model)})
    targets = list(layers_of(model)) if kind == "gpt2" else targets
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=targets,
        init_lora_weights="corda",
        corda_config=CordaConfig(),
        fan_in_fan_out=kind == "gpt2",
    )
    with torch.no_grad():
        plain = lm(input_ids=document[None]).logits
        preprocess_corda(lm, config, run_model=lambda: lm(input_ids=document[None]))
        theirs = get_peft_model(lm, config)
        assert distance(model.language_model(input_ids=document[None]).logits, plain) <= 1e-5
    for name, layer in layers_of(model).items():
        other = theirs.get_submodule(f"base_model.model.{name}")
        assert distance(update_of(layer), update_of(other)) <= 1e-3
        assert distance(layer.get_base_layer().weight, other.get_base_layer().weight) <= 1e-3


def require_best_update(model: TrainingModel, base: Any) -> None:
    """The adapter leaves as little of what packing lost of `base` as any of its rank can."""
    assert model.quantizer is not None
    for name, layer in layers_of(model).items():
        plain, kept = base.get_submodule(name), model.quantizer.unpacked(layer.get_base_layer(), torch.float32)
        error = weight_of(plain).to(kept.device) - kept
        best = torch.linalg.svdvals(error)[4:].square().sum().sqrt()
        assert 0 < best < 0.95 * error.norm()
        assert float((error - update_of(layer)).norm()) == pytest.approx(float(best), rel=1e-3)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_loftq_begins_with_best_update_for_what_packing_lost(kind: str) -> None:
    nf4 = QuantizationConfig(kind="nf4", double_quant=True)
    model = begun("loftq", kind, [packed(DOCUMENTS)], quantization=nf4)
    base = build_base(sections(model_config(kind, architecture=wide_numbers(kind)), lora()), CPU, 0)
    assert any("adapter.init=loftq: begins with" in each for each in model.remarks())
    require_best_update(model, base)
