"""E2M1 with block scales, MXFP4 and NVFP4: layers, expert stacks, and folders that store them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import MXFP4A16, NVFP4A16
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from app.adapters.merged_weights import read_updates
from app.base.base_model import load_base, open_base
from app.base.base_weights import LoadOptions
from app.base.tokenizer import load_tokenizer
from app.config.schema import AdapterConfig, ModelConfig, QuantizationConfig
from app.errors import ConfigError, EnvironmentProblem
from app.finished.save import plan_merge, save_model
from app.layers.experts import expert_modules
from app.layers.packed_linear import GROUPS, MXFP4, NVFP4, PackedLinear, PackedWeight, global_scales
from app.layers.quantization import Mxfp4, Nvfp4, quantizer_of
from app.model.build import count_weights, open_training_base
from tests.model.small import (
    CAUSAL,
    batch_of,
    build_model,
    built,
    distance,
    documents_of,
    lora,
    model_config,
    outcome,
    sections,
    wide_numbers,
)
from tests.model.test_conversion import changed, mxfp4_folder, without

COMPRESSORS = {MXFP4: (MXFP4PackedCompressor, MXFP4A16), NVFP4: (NVFP4PackedCompressor, NVFP4A16)}
QUANTIZERS: dict[str, Any] = {MXFP4: Mxfp4(), NVFP4: Nvfp4()}


def random_bytes(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.uint8)


def drawn(kind: str, outputs: int, inputs: int) -> dict[str, Tensor]:
    """All codes and many scales, by the names of compressed-tensors."""
    groups = inputs // GROUPS[kind]
    parts = {"weight_packed": random_bytes(0, 256, outputs, inputs // 2)}
    if kind == MXFP4:
        return parts | {"weight_scale": random_bytes(100, 132, outputs, groups)}
    scale = random_bytes(1, 126, outputs, groups).view(torch.float8_e4m3fn)
    return parts | {"weight_scale": scale, "weight_global_scale": torch.tensor([8123.457])}


def packed(kind: str, parts: dict[str, Tensor]) -> PackedWeight:
    codes, scale, divisor = parts["weight_packed"], parts["weight_scale"], parts.get("weight_global_scale")
    factor = None if divisor is None else global_scales(1 / divisor.double(), len(codes))
    return PackedWeight(kind, codes, scale.view(torch.uint8), global_scale=factor)


def scheme(kind: str) -> Any:
    return QuantizationScheme(targets=["Linear"], **COMPRESSORS[kind][1])


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_unpacked_weight_equals_that_of_compressed_tensors(kind: str) -> None:
    parts = drawn(kind, 24, 192)
    theirs = COMPRESSORS[kind][0].decompress(dict(parts), scheme(kind))["weight"]
    assert packed(kind, parts).unpacked(theirs.dtype).equal(theirs)


def test_scales_of_a_divisor_are_rounded_once() -> None:
    """compressed-tensors divides E4M3 scales by the global one in float32."""
    scale = torch.arange(1, 126, dtype=torch.uint8)[None]
    for divisor in torch.rand(200, generator=torch.Generator().manual_seed(0)) * 10_000:
        weight = PackedWeight(NVFP4, scale, scale, global_scale=global_scales(1 / divisor.double(), 1))
        assert weight.scales().equal(scale.view(torch.float8_e4m3fn).float() / divisor)


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_rounded_weight_has_bytes_of_compressed_tensors(kind: str) -> None:
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(0)) * 0.03
    weight[3, 32:64] = 0
    weight[5, 7] = 4.0
    compressor, preset = COMPRESSORS[kind]
    groups = weight.unflatten(1, (-1, GROUPS[kind]))
    largest = generate_gparam(weight.min(), weight.max()) if kind == NVFP4 else None
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), preset["weights"], global_scale=largest)
    parts = {"weight": weight, "weight_scale": scale} | ({} if largest is None else {"weight_global_scale": largest})
    theirs = compressor.compress(parts, scheme(kind))
    layer = QUANTIZERS[kind].quantized(with_weight(weight))
    used = theirs["weight_scale"].view(torch.uint8) != layer.scale
    assert layer.weight.equal(theirs["weight_packed"])
    assert not used[groups.abs().amax(-1) > 0].any()  # a group of zeros has any scale
    again = QUANTIZERS[kind].quantized(with_weight(layer.unpacked(torch.float32)))
    assert again.unpacked(torch.float32).equal(layer.unpacked(torch.float32))


def with_weight(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_numbers_halfway_between_two_become_the_even_code(kind: str) -> None:
    halfway = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    row = torch.tensor([[*halfway, *(-number for number in halfway)] * 2])
    layer = QUANTIZERS[kind].quantized(with_weight(row))
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert layer.unpacked(torch.float32)[0, :16].tolist() == [*expected, *(-number for number in expected)]


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_layer_forward_and_gradient_equal_dequantized_product(kind: str) -> None:
    bias = nn.Parameter(torch.randn(24))
    layer = PackedLinear(packed(kind, drawn(kind, 24, 192)), bias).to(torch.bfloat16).float()  # casts no bytes
    weight = packed(kind, drawn(kind, 24, 192)).unpacked(torch.float32)
    x = torch.randn(2, 5, 192, requires_grad=True)
    out, expected = layer(x), x @ weight.T + layer.bias
    assert distance(out.detach(), expected.detach()) <= 1e-6
    (of_x,), (of_x_expected,) = (torch.autograd.grad(side.cos().sum(), x) for side in (out, expected))
    assert distance(of_x, of_x_expected) <= 1e-5


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_stored_bytes_take_a_quarter_and_the_scales(kind: str) -> None:
    quantizer: Any = quantizer_of(QuantizationConfig(kind=kind), torch.bfloat16)
    layer = quantizer.quantized(nn.Linear(1024, 512, bias=False))
    size = sum(tensor.nbytes for tensor in [*layer.parameters(), *layer.buffers()])
    bits = 4 + 8 / GROUPS[kind] + (64 / 1024 if kind == NVFP4 else 0)
    assert size * 8 == bits * 1024 * 512


# ---- folders


CPU = torch.device("cpu")
BATCH = batch_of(documents_of((12, 9)))
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3(byte: int) -> float:
    exponent, fraction = byte >> 3 & 15, (byte & 7) / 8
    return float((1 + fraction) * 2 ** (exponent - 7)) if exponent else float(fraction * 2**-6)


def e8m0(byte: int) -> float:
    return float(2.0 ** (byte - 127))


class Case(NamedTuple):
    """A format: its section of config.json, its number format, and the tensors of a weight by their parts."""

    section: dict[str, Any]
    kind: str
    named: Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]  # codes, scale, factor of the scales


def compressed(kind: str, size: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "group_size": size, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 4}}}
    return {"quant_method": "compressed-tensors", "format": f"{kind}-pack-quantized", "config_groups": groups}


CASES = {
    "mxfp4": Case(
        compressed("mxfp4", 32), MXFP4, lambda codes, scale, _factor: {"weight_packed": codes, "weight_scale": scale}
    ),
    "nvfp4": Case(
        compressed("nvfp4", 16),
        NVFP4,
        lambda codes, scale, factor: {
            "weight_packed": codes,
            "weight_scale": scale.view(torch.float8_e4m3fn),
            "weight_global_scale": 1 / factor[None],
            "input_global_scale": torch.ones(1),
        },
    ),
    "modelopt": Case(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "kv_cache_scheme": {"num_bits": 8}},
        NVFP4,
        lambda codes, scale, factor: {
            "weight": codes,
            "weight_scale": scale.view(torch.float8_e4m3fn),
            "weight_scale_2": factor,
            "input_scale": torch.ones(()),
        },
    ),
}


def fp4_folder(name: str, folder: Path, plain: Path, model: str = "llama", **section: Any) -> Path:
    """Write a small model in a format, and in `plain` the same weights, dequantized by definition."""
    case = CASES[name]
    built(model, "eager", torch.bfloat16, **wide_numbers(model)).save_pretrained(str(folder))
    file = folder / "model.safetensors"
    tensors, dequantized = load_file(file), load_file(file)
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        outputs, inputs = tensors.pop(key).shape
        low, high, value = (118, 122, e8m0) if case.kind == MXFP4 else (40, 90, e4m3)
        codes = random_bytes(0, 256, outputs, inputs // 2)
        scale = random_bytes(low, high, outputs, inputs // GROUPS[case.kind])
        parts = case.named(codes, scale, torch.tensor(0.0137))
        factor = 1.0 if case.kind == MXFP4 else 0.0137
        if name == "nvfp4":
            factor = 1 / float(parts["weight_global_scale"])
        elif name == "modelopt":
            factor = float(parts["weight_scale_2"])
        scales = torch.tensor([[value(byte) * factor for byte in row] for row in scale.tolist()]).tolist()
        numbers = [
            [E2M1[code & 7] * (-1) ** (code >> 3) for byte in row for code in (byte & 15, byte >> 4)]
            for row in codes.tolist()
        ]
        rows = [
            [number * of_row[at // GROUPS[case.kind]] for at, number in enumerate(row)]
            for row, of_row in zip(numbers, scales, strict=True)
        ]
        tensors |= {key.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
        dequantized[key] = torch.tensor(rows, dtype=torch.float64).float()
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    plain.mkdir()
    save_file(dequantized, plain / "model.safetensors", metadata={"format": "pt"})
    (plain / "config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {**case.section, **section}}))
    return folder


def read(folder: Path, kind: str = "none", dtype: torch.dtype = torch.float32) -> Any:
    quantizer = quantizer_of(QuantizationConfig(kind=kind), dtype)
    return load_base(model_config(path=str(folder)), CAUSAL, LoadOptions(dtype, CPU, "eager"), 0, quantizer)


def packed_layers(network: nn.Module) -> dict[str, PackedLinear]:
    return {name: layer for name, layer in network.named_modules() if isinstance(layer, PackedLinear)}


@pytest.mark.parametrize("name", CASES)
def test_folder_read_dequantized_or_unchanged_equals_definition(name: str, tmp_path: Path) -> None:
    folder = fp4_folder(name, tmp_path / "packed", tmp_path / "plain")
    for dtype in (torch.float32, torch.bfloat16):
        expected, dequantized = read(tmp_path / "plain", dtype=dtype).state_dict(), read(folder, dtype=dtype)
        assert not hasattr(dequantized.config, "quantization_config")
        for key, tensor in dequantized.state_dict().items():
            assert torch.equal(tensor, expected[key]), key
        layers = packed_layers(read(folder, CASES[name].kind, dtype))
        assert len(layers) == sum(key.endswith("_proj.weight") for key in expected) > 0
        for key, layer in layers.items():
            assert layer.weight.nbytes == expected[f"{key}.weight"].numel() / 2
            assert torch.equal(layer.unpacked(dtype), expected[f"{key}.weight"])


def test_experts_of_modelopt_are_dequantized_into_stacks(tmp_path: Path) -> None:
    folder = fp4_folder("modelopt", tmp_path / "packed", tmp_path / "plain", "qwen3_moe")
    expected, dequantized = read(tmp_path / "plain").state_dict(), read(folder).state_dict()
    assert any(tensor.ndim == 3 for tensor in expected.values())
    assert all(tensor.equal(expected[name]) for name, tensor in dequantized.items())
    compare_with_plain_base(folder, tmp_path / "plain", "none", lora(experts=True))
    with pytest.raises(ConfigError, match="its experts are stacked, and stacks cannot be quantized to nvfp4"):
        read(folder, NVFP4)


def test_modelopt_section_of_own_file_is_read(tmp_path: Path) -> None:
    folder = fp4_folder("modelopt", tmp_path / "packed", tmp_path / "plain")
    config = json.loads((folder / "config.json").read_text())
    section = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    own = {"quant_algo": section["quant_algo"], "group_size": 16, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": own}))
    layers = packed_layers(read(folder, NVFP4))
    expected = read(tmp_path / "plain").state_dict()
    assert all(layer.unpacked(torch.float32).equal(expected[f"{key}.weight"]) for key, layer in layers.items())
    assert len(layers) == 14


def moved(parts: Any, path: Path) -> Any:
    """A model whose adapter is no longer without effect."""
    model = build_model(parts, CPU, 0, str(path))
    generator = torch.Generator().manual_seed(3)
    for parameter in model.trained().values():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def merged(model: Any, parts: Any, final: Path, dtype: str) -> dict[str, Tensor]:
    save_model(model, load_tokenizer(model_config(), needs_template=True), final)
    merge = plan_merge(parts, read_updates(final), dtype, CPU, final)
    return {key: merge.weight(key)[0] for key in merge.written}


def compare_with_plain_base(folder: Path, plain: Path, kind: str, adapter: AdapterConfig) -> dict[str, Tensor]:
    """Train and merge on packed and on dequantized weights; return the weights merged in bf16."""
    outcomes, weights = [], []
    for path, quantization in ((folder, kind), (plain, "none")):
        config = ModelConfig(path=str(path), weights="pretrained", architecture={})
        parts = sections(config, adapter, "fp32", quantization=QuantizationConfig(kind=quantization))
        model = moved(parts, path)
        outcomes.append(outcome(model, BATCH))
        weights.append(merged(model, parts, path / "final", "bf16"))
    (loss, gradients), (expected_loss, expected) = outcomes
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert distance(gradients, expected) <= 1e-5
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[1])
    return weights[0]


@pytest.mark.parametrize("name", CASES)
def test_adapter_on_packed_base_trains_and_merges_as_on_dequantized_weights(name: str, tmp_path: Path) -> None:
    folder = fp4_folder(name, tmp_path / "packed", tmp_path / "plain")
    compare_with_plain_base(folder, tmp_path / "plain", CASES[name].kind, lora())


def test_adapter_on_expert_stacks_of_gpt_oss_trains_and_merges_as_on_dequantized_weights(tmp_path: Path) -> None:
    folder, plain = mxfp4_folder(tmp_path / "packed"), tmp_path / "plain"
    read(folder).save_pretrained(str(plain))
    stored = load_file(folder / "model.safetensors")
    lm = read(folder, MXFP4)
    layers = packed_layers(lm)
    assert len(layers) == 4
    assert all("experts" in name for name in layers)
    for place, experts in expert_modules(lm).items():
        for name, layer in experts.packed.named_children():
            assert layer.weight.equal(stored[f"{place}.{name}_blocks"].view_as(layer.weight))
            assert layer.scale.equal(stored[f"{place}.{name}_scales"].view_as(layer.scale))
    weights = compare_with_plain_base(folder, plain, MXFP4, lora(experts=True))
    before = load_file(plain / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    assert weights[name].shape == before[name].shape
    assert 0 < distance(weights[name].float(), before[name]) < 0.5


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("mxfp4", "of weights quantized by mxfp4, used unchanged"),
        ("nf4", "dequantized while loading and quantized again to nf4; quantization=mxfp4 uses them unchanged"),
    ],
)
def test_run_on_gpt_oss_says_whether_its_weights_are_used_unchanged(kind: str, words: str, tmp_path: Path) -> None:
    folder = mxfp4_folder(tmp_path)
    config = ModelConfig(path=str(folder), weights="pretrained", architecture={})
    parts = sections(config, lora(), "fp32", quantization=QuantizationConfig(kind=kind))
    assert words in " ".join(open_training_base(parts, CPU, 0).remarks)


@pytest.mark.parametrize(
    ("name", "section", "message"),
    [
        ("modelopt", {"quant_algo": "NVFP4_AWQ"}, "modelopt (quant_algo NVFP4_AWQ), which is not supported"),
        ("modelopt", {"group_size": 32}, "modelopt (groups of 32 weights)"),
        ("nvfp4", {"transform_config": {"config_groups": {}}}, "with transformed layer inputs"),
        ("mxfp4", {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}}, "8 bits, type float"),
    ],
)
def test_unsupported_fp4_folder_is_refused_from_config_alone(
    name: str, section: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = fp4_folder(name, tmp_path / "packed", tmp_path / "plain", **section)
    (folder / "model.safetensors").write_bytes(b"not read")
    parts = sections(ModelConfig(path=str(folder), weights="pretrained", architecture={}), lora())
    with pytest.raises(ConfigError) as caught:
        count_weights(parts, open_base(parts.model, parts.task))
    assert message in str(caught.value)


def test_missing_ill_fitting_and_infinite_scales_are_refused(tmp_path: Path) -> None:
    folder = fp4_folder("nvfp4", tmp_path / "packed", tmp_path / "plain")
    file, name = folder / "model.safetensors", "model.layers.0.mlp.up_proj.weight_scale"
    tensors = load_file(file)
    wide = torch.ones(128, 8).to(torch.float8_e4m3fn)
    nan = torch.full_like(tensors[name].view(torch.uint8), 127).view(torch.float8_e4m3fn)
    for scale, words in (
        (wide, r"scales \(128, 8\) .* do not fit a weight \(128, 64\)"),
        (nan, "the scale of .* has NaN"),
    ):
        save_file({**tensors, name: scale}, file, metadata={"format": "pt"})
        with pytest.raises(EnvironmentProblem, match=words):
            read(folder, NVFP4)
    save_file(tensors, file, metadata={"format": "pt"})
    changed(folder, without("0.mlp.up_proj.weight_global_scale"))
    with pytest.raises(EnvironmentProblem, match=r"up_proj\.weight_packed has no .*up_proj\.weight_global_scale"):
        read(folder)


def test_inputs_of_no_whole_blocks_are_refused() -> None:
    model = model_config("llama", architecture=wide_numbers("llama", intermediate_size=80))
    with pytest.raises(ConfigError, match=r"quantization\.kind=mxfp4: .*down_proj has 80 inputs, not a multiple of 32"):
        count_weights(sections(model, lora(), quantization=QuantizationConfig(kind=MXFP4)))
