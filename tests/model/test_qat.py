"""Quantisation-aware training gives an ordinary model, and the loss of the one that torchao quantises."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.base.tokenizer import load_tokenizer
from app.config.schema import QuantizationConfig
from app.errors import ConfigError
from app.finished.save import save_model
from app.layers import quantization
from app.layers.quantization import backbone_linear_layers, quantizer_of
from tests.harness.runs import SMALL, Zygote, result
from tests.model.small import batch_of, distance, documents_of, full, model_config, outcome, training_model_of

ROWS = documents_of((12, 9))


@pytest.mark.parametrize("scheme", ["int4", "int8da_int4"])
def test_final_model_quantised_by_torchao_has_the_loss_of_training(scheme: str, tmp_path: Path) -> None:
    from torchao.quantization import quantize_
    from transformers import LlamaForCausalLM

    config = QuantizationConfig(kind="qat", scheme=scheme)
    model, plain = (
        training_model_of(quantization=config),
        training_model_of(quantization=QuantizationConfig(kind="none")),
    )
    assert model.trained().keys() == plain.trained().keys()
    batch = batch_of(ROWS)
    faked, own = outcome(model, batch), outcome(plain, batch)
    assert faked[0] != own[0]
    assert 1e-3 < distance(faked[1], own[1]) < 1

    save_model(model, load_tokenizer(model_config(), needs_template=False), tmp_path)
    lm: Any = LlamaForCausalLM.from_pretrained(tmp_path)
    for name, each in plain.language_model.state_dict().items():
        assert torch.equal(lm.state_dict()[name], each)
    layers = set(backbone_linear_layers(lm))
    quantizer: Any = quantizer_of(config, torch.float32)
    quantize_(lm, quantizer.config(), lambda _module, name: name in layers)
    with torch.no_grad():
        losses = [float(lm(input_ids=ids[None], labels=ids[None]).loss) * (len(ids) - 1) for ids in ROWS]
    assert sum(losses) == pytest.approx(faked[0], rel=1e-4)


def test_rounded_weight_is_that_of_the_forward_pass() -> None:
    quantizer: Any = quantizer_of(QuantizationConfig(kind="qat"), torch.float32)
    weight: Tensor = torch.randn(8, 64)
    rounded = quantizer.rounded(weight)
    assert 0.02 < float((rounded - weight).norm() / weight.norm()) < 0.2
    assert all(len(group.unique()) <= 16 for group in rounded.view(-1, 32))


def test_qat_of_what_cannot_be_rounded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = QuantizationConfig(kind="qat")
    with pytest.raises(ConfigError, match="a model of kind gpt2 has Conv1D"):
        training_model_of("gpt2", full(), quantization=config)
    with pytest.raises(ConfigError, match=r"has 48 inputs, not a multiple of 32. Set quantization=none, or choose"):
        training_model_of(model=model_config(), quantization=config)
    monkeypatch.setattr(quantization, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="torchao, which is not installed: pip install torchao"):
        training_model_of(quantization=config)


def test_qat_run_is_planned_and_says_how_it_was_trained(zygote: Zygote, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("recipe=full", "quantization=qat", "training.max_steps=3", f"output_dir={run}")
    ended = zygote.finish(tmp_path, *SMALL, *words)
    assert "qat, fp32 on cpu" in ended.stdout
    assert "Trained for quantisation by torchao to int4" in (run / "final" / "README.md").read_text()
    memory = result(run)
    assert memory["memory_predicted_bytes"] == pytest.approx(memory["memory_measured_bytes"], rel=0.01)
