"""Weights in the format of compressed-tensors, read by that package and by transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from app.config.finished_run import COMPRESSED, export_config
from app.errors import ConfigError
from app.evaluation.run import prepare_evaluation
from app.exports import reload
from app.exports.compressed_tensors import FORMATS
from app.exports.export import prepare_export
from tests.command.test_export import export, report
from tests.harness.runs import FinishedRuns, Zygote
from tests.model.small import distance

IDS = torch.arange(1, 30)[None]


def dequantized(quant: str, parts: dict[str, Tensor]) -> Tensor:
    """The weight of a layer by the definition of its format."""
    scale = parts["weight_scale"].double()
    if quant != "w4a16":
        return parts["weight"].double() * scale
    places = torch.arange(0, 32, 4, dtype=torch.int32)
    numbers: Any = ((parts["weight_packed"][..., None] >> places) & 15).flatten(1) - 8
    weight: Tensor = (numbers.unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1)
    return weight


@pytest.mark.parametrize("quant", COMPRESSED)
def test_packed_weight_equals_that_of_compressed_tensors(quant: str) -> None:
    form = FORMATS[quant]
    weight = torch.randn(48, 256) * torch.logspace(-3, 2, 48)[:, None]
    weight[7] = 0
    parts = form.pack(weight, torch.float32)
    scheme = QuantizationScheme(**form.config([])["config_groups"]["group_0"])
    compressor: Any = BaseCompressor.get_value_from_registry(form.name)
    theirs = compressor.compress({"weight": weight, "weight_scale": parts["weight_scale"]}, scheme)
    assert parts.keys() == theirs.keys()
    for name, tensor in parts.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor.float(), theirs[name].float()), name
    unpacked = compressor.decompress(dict(parts), scheme)["weight"].double()
    torch.testing.assert_close(unpacked, dequantized(quant, parts), rtol=1e-6, atol=0)
    error = float((unpacked - weight).norm() / weight.norm())
    assert error < {"fp8": 0.03, "w8a8": 0.01, "w4a16": 0.15}[quant]


def own_model(out: Path, quant: str) -> Any:
    """The exported model from its files by definition, in fp32 and without compressed-tensors."""
    config = AutoConfig.from_pretrained(out)
    del config.quantization_config
    lm: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_file(out / "model.safetensors")
    for name, module in lm.named_modules():
        parts = {n.removeprefix(f"{name}."): t for n, t in tensors.items() if n.startswith(f"{name}.weight")}
        if "weight_scale" in parts:
            tensors[f"{name}.weight"] = dequantized(quant, parts)
            module.register_forward_pre_hook(lambda _layer, rows: (rounded_rows(quant, rows[0]),))
    lm.load_state_dict({name: t for name, t in tensors.items() if not name.endswith(("_scale", "_packed", "_shape"))})
    return lm.eval()


def rounded_rows(quant: str, rows: Tensor) -> Tensor:
    scale = rows.abs().amax(-1, keepdim=True) / (448 if quant == "fp8" else 127)
    if quant == "fp8":
        return (rows / scale).to(torch.float8_e4m3fn).float() * scale
    return (rows / scale).round() * scale if quant == "w8a8" else rows


@pytest.mark.parametrize("quant", COMPRESSED)
def test_export_loads_in_transformers_and_computes_dequantized_weights(
    quick_zygote: Zygote, finished: FinishedRuns, tmp_path: Path, quant: str
) -> None:
    ended = export(quick_zygote, tmp_path, finished(), "kind=quantized", f"quant={quant}")
    assert (ended.code, ended.stderr) == (0, ""), ended.stdout
    assert "vllm    vllm serve out" in ended.stdout
    verified, out = report(tmp_path / "out"), tmp_path / "out"
    assert 0 < verified["kl"] < verified["tolerance"] / 2
    assert verified["loss_difference"] < verified["loss_tolerance"] / 2
    assert verified["base_kl"] > 10 * verified["kl"]
    share = (verified["base_loss"] - verified["loss_after"]) / (verified["base_loss"] - verified["loss_before"])
    assert verified["kept_share"] == pytest.approx(share)
    assert verified["kept_share"] > 0.9
    assert verified["kept_share_limit"] == (0.9 if quant == "w4a16" else None)
    line = f"keeps {share:.1%} of the loss improvement from training"
    assert f"{line} (base loss {verified['base_loss']:.4f})" in ended.stdout
    assert f"On these rows, it {line}." in (out / "README.md").read_text()
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert "lm_head" in config["ignore"]
    assert ("model.layers.0.self_attn.q_proj" in config["ignore"]) == (quant == "w4a16")  # of 64 inputs
    assert ("12 of 14 linear layers stay in bf16" in ended.stdout) == (quant == "w4a16")
    plain, exact = (AutoModelForCausalLM.from_pretrained(out, dtype="auto").eval() for _ in range(2))
    reload.in_fp32(exact)
    reload.round_rows(exact, FORMATS[quant].rows)
    with torch.no_grad():
        expected = own_model(out, quant)(IDS).logits
        assert distance(exact(IDS).logits, expected) < 1e-4
        assert distance(plain(IDS).logits.float(), expected) < 0.05  # in bf16, with its own rounding of rows


def test_export_of_base_weights_fails(quick_zygote: Zygote, finished: FinishedRuns, tmp_path: Path) -> None:
    ended = export(quick_zygote, tmp_path, finished(), "kind=quantized", "quant=w4a16", SPOIL="base")
    assert ended.code == 3, ended.stderr
    assert "training is lost: the KL divergence to the export is" in ended.stdout
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["export.json"]


def test_model_without_fitting_layers_refused(
    finished: FinishedRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FORMATS, "w4a16", FORMATS["w4a16"]._replace(multiple=256))
    config = export_config([f"run={finished()}", f"to={tmp_path}/out", "kind=quantized", "quant=w4a16"])
    evaluation = prepare_evaluation(config, config.folder, {}, tuned=True, say=lambda _: None)
    with pytest.raises(
        ConfigError, match=r"no layer of this model can be quantized \(model\.layers\.0\..* has 128 inputs"
    ):
        prepare_export(config, evaluation)
    assert not (tmp_path / "out").exists()
