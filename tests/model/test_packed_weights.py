"""Models in GPTQ, AWQ and compressed-tensors: read, trained on unchanged, and merged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.adapters.merged_weights import read_updates
from app.base.base_model import load_base, open_base
from app.base.base_weights import LoadOptions
from app.base.tokenizer import load_tokenizer
from app.config.schema import ModelConfig, QuantizationConfig
from app.errors import ConfigError, EnvironmentProblem
from app.finished.save import plan_merge, save_model
from app.layers.packed_linear import PackedLinear, round_to_int4
from app.layers.quantization import quantizer_of
from app.model.build import count_weights, open_training_base
from tests.model.packed_folders import CASES, GROUP, packed_folder
from tests.model.small import (
    CAUSAL,
    batch_of,
    build_model,
    distance,
    documents_of,
    lora,
    model_config,
    outcome,
    sections,
)

CPU = torch.device("cpu")
OPTIONS = LoadOptions(torch.float32, CPU, "eager")
INT4 = QuantizationConfig(kind="int4", group_size=GROUP)
BATCH = batch_of(documents_of((12, 9)))


def read(folder: Path, quantization: QuantizationConfig | None = None, options: LoadOptions = OPTIONS) -> Any:
    quantizer = None if quantization is None else quantizer_of(quantization, options.dtype)
    return load_base(model_config(path=str(folder)), CAUSAL, options, 0, quantizer)


def packed_layers(network: nn.Module) -> dict[str, PackedLinear]:
    return {name: layer for name, layer in network.named_modules() if isinstance(layer, PackedLinear)}


@pytest.mark.parametrize("name", CASES)
def test_packed_folder_read_dequantized_or_unchanged_equals_definition(name: str, tmp_path: Path) -> None:
    folder = packed_folder(name, tmp_path / "packed", tmp_path / "plain")
    expected = read(tmp_path / "plain").state_dict()
    dequantized = read(folder)
    assert not hasattr(dequantized.config, "quantization_config")
    for key, tensor in dequantized.state_dict().items():
        assert torch.equal(tensor, expected[key]), key
    layers = packed_layers(read(folder, INT4))
    assert len(layers) == sum(key.endswith("_proj.weight") for key in expected) > 0
    for key, layer in layers.items():
        weight = expected[f"{key}.weight"]
        assert layer.weight.nbytes == weight.numel() / 2
        assert (layer.group is not None) == CASES[name].order
        assert torch.equal(layer.unpacked(torch.float32), weight)
        assert torch.equal(layer.unpacked(torch.bfloat16), weight.bfloat16()), "rounded once"


@pytest.mark.filterwarnings("ignore:You passed .quantization_config.")
def test_pack_quantized_folder_equals_own_decompression_of_compressed_tensors(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    folder = packed_folder("compressed", tmp_path / "packed")
    config = CompressedTensorsConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    ours = read(folder).state_dict()
    for key, tensor in theirs.state_dict().items():
        assert distance(ours[key], tensor) <= 1e-3, key  # theirs multiplies in float16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_layer_forward_and_gradient_equal_dequantized_product(dtype: torch.dtype, bias: bool) -> None:
    packed = round_to_int4(torch.randn(40, 96), GROUP, torch.float16)
    layer = PackedLinear(packed, nn.Parameter(torch.randn(40, dtype=dtype)) if bias else None)
    x = torch.randn(5, 96, dtype=dtype, requires_grad=True)
    weight = packed.unpacked(dtype)
    expected = torch.nn.functional.linear(x, weight, layer.bias)
    upstream = torch.randn_like(expected)
    assert torch.equal(layer(x), expected)
    found, wanted = (torch.autograd.grad(y, x, upstream)[0] for y in (layer(x), expected))
    assert torch.equal(found, wanted)


def test_large_packed_weight_is_dequantized_in_pieces_without_a_difference() -> None:
    weight = torch.randn(1030, 2048)
    packed = round_to_int4(weight, 128, torch.bfloat16)
    numbers = torch.stack((packed.codes & 15, packed.codes >> 4), -1).flatten(1).float() - 8
    expected = (numbers.unflatten(1, (-1, 128)) * packed.scale.float()[..., None]).flatten(1)
    assert torch.equal(packed.unpacked(torch.float32), expected)
    assert 0.1 < distance(expected, weight) < 0.12


@pytest.mark.parametrize("name", ["gptq_order", "awq", "compressed"])
def test_adapter_on_packed_base_trains_and_merges_as_on_dequantized_weights(name: str, tmp_path: Path) -> None:
    folder = packed_folder(name, tmp_path / "packed", tmp_path / "plain")
    models, parts = [], []
    for path, quantization in ((folder, INT4), (tmp_path / "plain", None)):
        config = ModelConfig(path=str(path), weights="pretrained", architecture={})
        parts.append(sections(config, lora(), "fp32", quantization=quantization))
        models.append(build_model(parts[-1], CPU, 0, str(path)))
        generator = torch.Generator().manual_seed(3)
        for parameter in models[-1].trained().values():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    (loss, gradients), (expected_loss, expected) = (outcome(model, BATCH) for model in models)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert distance(gradients, expected) <= 1e-5
    merged: list[dict[str, Tensor]] = []
    for number, (model, part) in enumerate(zip(models, parts, strict=True)):
        final = tmp_path / f"final-{number}"
        save_model(model, load_tokenizer(model_config(), needs_template=True), final)
        merge = plan_merge(part, read_updates(final), "fp32", CPU, final)
        merged.append({key: merge.weight(key)[0] for key in merge.written})
    assert merged[0].keys() == merged[1].keys()
    assert distance(merged[0], merged[1]) <= 1e-6


def test_nf4_run_on_packed_base_names_the_quantization_that_keeps_it(tmp_path: Path) -> None:
    folder = packed_folder("awq", tmp_path)
    parts = sections(ModelConfig(path=str(folder), weights="pretrained", architecture={}), lora(), "fp32")
    for kind, expected in (
        ("nf4", "quantized again to nf4; quantization=int4 uses them unchanged"),
        ("int4", "awq, used unchanged"),
    ):
        quantization = QuantizationConfig(kind=kind, group_size=GROUP)
        base = open_training_base(sections(parts.model, lora(), "fp32", quantization=quantization), CPU, 0)
        assert any(expected in remark for remark in base.remarks), base.remarks


@pytest.mark.parametrize(
    ("name", "section", "message"),
    [
        ("gptq", {"bits": 8}, "quantized with gptq (8 bits), which is not supported"),
        ("gptq", {"checkpoint_format": "marlin"}, "gptq (checkpoint_format marlin)"),
        ("awq", {"version": "gemv"}, "awq (version gemv)"),
        ("compressed", {"format": "float-quantized"}, "compressed-tensors (format float-quantized)"),
        ("compressed", {"transform_config": {"config_groups": {}}}, "with transformed layer inputs"),
        ("gptq", {"group_size": 64}, "have groups of 64. Set quantization.group_size=64."),
    ],
)
def test_unsupported_packed_folder_is_refused_from_config_alone(
    name: str, section: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = packed_folder(name, tmp_path, **section)
    (folder / "model.safetensors").write_bytes(b"not read")
    parts = sections(ModelConfig(path=str(folder), weights="pretrained", architecture={}), lora(), quantization=INT4)
    with pytest.raises(ConfigError) as caught:
        count_weights(parts, open_base(parts.model, parts.task))
    assert message in str(caught.value)


def test_folder_with_unquantized_layer_or_missing_part_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = packed_folder("gptq", tmp_path) / "model.safetensors"
    tensors = load_file(file)
    layer = "model.layers.0.mlp.up_proj"
    parts = {key: tensors.pop(key) for key in list(tensors) if key.startswith(layer)}
    save_file({**tensors, f"{layer}.qweight": parts[f"{layer}.qweight"]}, file, metadata={"format": "pt"})
    with pytest.raises(EnvironmentProblem, match=r"up_proj.qweight has no model.layers.0.mlp.up_proj.qzeros"):
        read(tmp_path)
    save_file({**tensors, f"{layer}.weight": torch.zeros(128, 64)}, file, metadata={"format": "pt"})
    read(tmp_path)
    with pytest.raises(ConfigError, match=r"stores 1 of \d+ weights unquantized \(model.layers.0.mlp.up_proj.weight\)"):
        read(tmp_path, INT4)
