"""Quantized layers, quantization-aware training, and number formats against their definitions."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.base.base_model import BaseModel, load_base, open_weights
from app.base.base_weights import LoadOptions
from app.base.tokenizer import load_tokenizer
from app.config.schema import ModelConfig, QuantizationConfig
from app.config.tasks import TASKS
from app.errors import ConfigError
from app.finished.save import save_base, save_model
from app.layers import quantization
from app.layers.attention import register
from app.layers.frozen_linear import Int8Linear, LlmInt8Linear, llm_int8_reference, quantize_reference
from app.layers.nf4 import dequantized, linear_4bit
from app.layers.quantization import NUMBER_FORMATS, Bits4, backbone_linear_layers, quantization_errors, quantizer_of
from app.model.build import ModelSections, count_weights, random_base
from app.model.training_model import TrainingModel
from tests.harness.runs import SMALL, Zygote, result
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
    sections,
    training_model_of,
    wide_numbers,
)

CPU = torch.device("cpu")
NF4, FP4 = (QuantizationConfig(kind=kind, double_quant=True) for kind in ("nf4", "fp4"))
INT8 = QuantizationConfig(kind="int8")
SEVERAL = {"nf4": NF4, "fp4": FP4, "int8": INT8}
DENSE = ["llama", "qwen2", "gemma2", "gpt2", "phi3", "cohere2"]
WITH_EXPERTS = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"]
IDS = documents_of((10,))[0][None]
BATCH = batch_of(documents_of((12, 9)))


def wide(kind: str = "llama", **given: Any) -> ModelConfig:
    """The section of a model that can be quantized."""
    return model_config(kind, **({"architecture": wide_numbers(kind)} | given))


def parts_of(kind: str = "llama", precision: str = "fp32", **given: Any) -> ModelSections:
    model = given.pop("model", None) or wide(kind)
    return sections(model, lora(), precision, quantization=NF4, **given)


def qlora(kind: str = "llama", precision: str = "fp32", **given: Any) -> TrainingModel:
    return training_model_of(kind, lora(), precision, quantization=NF4, **given)


def packed_layers(network: nn.Module) -> Iterator[tuple[str, Any]]:
    from bitsandbytes.nn import Linear4bit

    yield from ((name, m) for name, m in network.named_modules() if isinstance(m, Linear4bit))


def packed_bytes(network: nn.Module) -> dict[str, Tensor]:
    """Bytes and scales of quantized layers, by names of the plain model."""
    found: dict[str, Tensor] = {
        f"{name}.{what}": getattr(layer, what).clone()
        for name, layer in network.named_modules()
        if isinstance(layer, Int8Linear)
        for what in ("weight", "scale")
    }
    for name, layer in packed_layers(network):
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        state = layer.weight.quant_state
        assert state is layer.quant_state
        found |= {
            f"{plain}.weight": layer.weight.data.clone(),
            f"{plain}.scales": state.absmax.clone(),
            f"{plain}.scales of scales": state.state2.absmax.clone(),
            f"{plain}.offset": state.offset.clone(),
        }
    assert found
    return found


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)


def linear_in_backbone(kind: str) -> dict[str, int]:
    lm = BaseModel(wide(kind), CAUSAL).on_meta()
    return {
        name: module.weight.numel()
        for name, module in lm.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
        and name.startswith(f"{lm.base_model_prefix}.")
    }


@pytest.mark.parametrize("kind", DENSE)
def test_nf4_base_has_backbone_in_four_bits_and_head_as_before(kind: str) -> None:
    options = LoadOptions(torch.bfloat16, CPU, register("sdpa"))
    lm = load_base(wide(kind), CAUSAL, options, 0, packing(torch.bfloat16))
    layers = dict(packed_layers(lm))
    sizes = linear_in_backbone(kind)
    assert layers.keys() == sizes.keys()
    for name, layer in layers.items():
        assert (layer.weight.dtype, layer.weight.numel()) == (torch.uint8, sizes[name] / 2)
        state = layer.weight.quant_state
        assert (state.quant_type, state.blocksize, state.nested, state.dtype) == (
            "nf4", 64, True, torch.bfloat16,
        )  # fmt: skip
        assert layer.compute_dtype == torch.bfloat16
    others = [p for name, p in lm.named_parameters() if name.rpartition(".")[0] not in layers]
    assert {p.dtype for p in others} == {torch.bfloat16}
    assert lm.get_output_embeddings().weight.shape == (64, 64)
    assert lm.get_output_embeddings().weight.dtype == torch.bfloat16


def packing(compute: torch.dtype) -> Any:
    return quantizer_of(NF4, compute)


@pytest.mark.parametrize(("kind", "precision"), [("llama", "bf16"), ("gpt2", "fp32")])
def test_nf4_random_base_saved_and_read_same_bytes(kind: str, precision: str, tmp_path: Path) -> None:
    parts = parts_of(kind, precision)
    training_model = build_model(parts, CPU, 0, "base")
    base = packed_bytes(training_model.network)
    assert same(packed_bytes(build_model(parts, CPU, 0, "base").network), base)
    assert not same(packed_bytes(build_model(parts, CPU, 1, "base").network), base)

    tokenizer = load_tokenizer(wide(), needs_template=True)
    unpacked = random_base(parts, CPU, 0)
    save_base(training_model, tokenizer, tmp_path, unpacked)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    again = build_model(parts_of(precision=precision, model=wide(path=str(tmp_path))), CPU, 0, "base")
    assert same(packed_bytes(again.network), base)
    others = {name: p for name, p in training_model.network.named_parameters() if ".base_layer." not in name}
    assert same({name: p for name, p in again.network.named_parameters() if name in others}, others)


@pytest.mark.parametrize(
    ("kind", "base"),
    [("llama", "nf4"), ("gpt2", "nf4"), ("qwen2", "nf4"), ("llama", "fp4"), ("gpt2", "int8"), ("mixtral", "nf4")],
)
def test_folder_quantized_while_read_same_bytes(kind: str, base: str, tmp_path: Path) -> None:
    built(kind, "eager", **wide_numbers(kind)).save_pretrained(str(tmp_path))
    config = wide(path=str(tmp_path))
    whole = load_base(config, CAUSAL, LoadOptions(torch.float32, CPU, register("sdpa")), 0)
    quantizer = quantizer_of(SEVERAL[base], torch.float32)
    assert quantizer is not None
    quantizer.quantize(whole)
    read = load_base(config, CAUSAL, LoadOptions(torch.float32, CPU, register("sdpa")), 0, quantizer)
    assert same(packed_bytes(read), packed_bytes(whole))
    with torch.no_grad():
        assert read.eval()(IDS).logits.equal(whole.eval()(IDS).logits)


def test_nf4_bf16_folder_same_bytes_in_fp32_run(tmp_path: Path) -> None:
    built("llama", "eager", torch.bfloat16, **wide_numbers("llama")).save_pretrained(str(tmp_path))
    config = wide(path=str(tmp_path))
    found = [
        packed_bytes(load_base(config, CAUSAL, LoadOptions(dtype, CPU, register("sdpa")), 0, packing(dtype)))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert same(*found)


def rounded_copy(training_model: TrainingModel, precision: str) -> TrainingModel:
    """The model in plain linear layers that have the weights as its quantized ones give them back."""
    plain, quantizer = training_model_of("llama", lora(), precision, model=wide()), training_model.quantizer
    assert quantizer is not None
    given = dict(training_model.network.named_parameters())
    for name, parameter in plain.network.named_parameters():
        quantized = given[name].shape != parameter.shape or not given[name].is_floating_point()
        source = quantizer.rounded(parameter.detach()) if quantized else given[name]
        parameter.data = source.detach().to(parameter.dtype).clone()
    return plain


def test_nf4_layer_computes_with_own_quant_state() -> None:
    """FSDP gathers a weight as a plain parameter, in backward too."""
    layer: Any = Bits4("nf4", double_quant=True, compute=torch.float32).quantized(nn.Linear(64, 32))
    holder = nn.Sequential(layer)
    packing(torch.float32).finish(holder)
    x = torch.randn(5, 64, requires_grad=True)
    expected = layer(x)
    (of_x,) = torch.autograd.grad(expected.cos().sum(), x)
    weight = dequantized(layer)
    layer.weight = nn.Parameter(layer.weight.data.clone(), requires_grad=False)
    found = layer(x)
    assert torch.equal(found, expected)
    assert torch.equal(torch.autograd.grad(found.cos().sum(), x)[0], of_x)
    assert distance(found.detach(), (x @ weight.T + layer.bias).detach()) <= 1e-6


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", 1e-5), ("bf16", 1e-2)])
@pytest.mark.parametrize(("base", "error"), [("nf4", (0.08, 0.1)), ("fp4", (0.1, 0.13)), ("int8", (0.004, 0.008))])
def test_loss_and_gradients_equal_rounded_weights(
    base: str, error: tuple[float, float], precision: str, allowed: float
) -> None:
    model = training_model_of("llama", lora(), precision, quantization=SEVERAL[base])
    assert model.remarks() == []
    plain = rounded_copy(model, precision)
    (loss, found), (wanted_loss, wanted) = outcome(model, BATCH), outcome(plain, BATCH)
    assert loss == pytest.approx(wanted_loss, rel=allowed)
    assert distance(found, wanted) <= allowed
    assert all(g.abs().max() > 0 for g in found.values())
    exact = random_base(parts_of(precision=precision), CPU, 0).base_model.layers[0].mlp.up_proj.weight
    rounded = plain.language_model.base_model.layers[0].mlp.up_proj.base_layer.weight
    assert error[0] < distance(rounded.detach().float(), exact.detach().float()) < error[1]


def test_int8_layer_computes_as_that_of_bitsandbytes() -> None:
    """In training on a CPU, where LLM.int8 rounds no rows and holds no outliers apart."""
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    plain = nn.Linear(96, 40)
    theirs = Linear8bitLt(96, 40, has_fp16_weights=False, threshold=6.0)
    theirs.weight = Int8Params(plain.weight.data.clone(), requires_grad=False).to("cpu")
    theirs.bias.data = plain.bias.data.clone()
    ours = Int8Linear(plain.weight.detach(), plain.bias)
    x = torch.randn(2, 7, 96) * torch.tensor([1.0] * 95 + [50.0])
    (found, of_x), (wanted, of_x_wanted) = (
        (out.detach(), torch.autograd.grad(out.cos().sum(), leaf)[0])
        for layer in (ours, theirs.train())
        for leaf in [x.clone().requires_grad_()]
        for out in [layer(leaf)]
    )
    assert torch.equal(ours.weight, theirs.weight)
    assert distance(found, wanted) <= 1e-6
    assert distance(of_x, of_x_wanted) <= 1e-6


def with_outliers(rows: int, inputs: int, columns: list[int]) -> Tensor:
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1)).clamp_(-5, 5)
    x[::2, columns] = 40.0
    x[1::2, columns] = 3.0
    return x


def llm_int8_by_definition(x: Tensor, layer: LlmInt8Linear) -> Tensor:
    """Number by number in float64: a column with a value of at least 6 is not rounded."""
    rows, weight = x.half().double(), layer.weight.double()
    columns = {j for j in range(rows.shape[1]) if max(map(abs, rows[:, j].tolist())) >= 6}
    out = torch.zeros(len(rows), len(weight), dtype=torch.float64)
    for i, row in enumerate(rows.tolist()):
        scale = max(abs(value) for value in row if abs(value) < 6) / 127
        for j, value in enumerate(row):
            number = float(x[i, j]) if j in columns else round(value / scale) * scale
            out[i] += number * weight[:, j]
    return out * layer.scale.double().T + (0 if layer.bias is None else layer.bias.detach().double())


@pytest.mark.parametrize("columns", [[], [5], [3, 90]])
def test_llm_int8_product_equals_definition_and_bitsandbytes(columns: list[int]) -> None:
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    plain = nn.Linear(96, 40)
    theirs = Linear8bitLt(96, 40, has_fp16_weights=False, threshold=6.0).eval()  # in training a CPU rounds no inputs
    theirs.weight = Int8Params(plain.weight.data.clone(), requires_grad=False).to("cpu")
    theirs.bias.data = plain.bias.data.clone()
    layer, x = LlmInt8Linear(plain.weight.detach(), plain.bias), with_outliers(14, 96, columns)
    found = layer(x).detach()
    assert distance(found.double(), llm_int8_by_definition(x, layer)) <= 1e-6
    assert distance(found, theirs(x).detach()) <= 1e-4  # its constant 1 / 127**2 has five digits
    assert distance(layer(x.view(2, 7, 96)).detach().view(14, 40), found) == 0
    assert distance(layer(x.bfloat16()).detach().float(), found) <= 1e-2


def test_llm_int8_gradient_is_that_of_dequantized_product() -> None:
    layer = LlmInt8Linear(torch.randn(40, 96), None)
    x = with_outliers(14, 96, [5]).requires_grad_()
    upstream = torch.randn(14, 40)
    (found,) = torch.autograd.grad(layer(x), x, upstream)
    (expected,) = torch.autograd.grad(x @ (layer.weight * layer.scale).T, x, upstream)
    assert distance(found, expected) <= 1e-6


def test_llm_int8_threshold_keeps_error_small_with_outliers() -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    layer, x = LlmInt8Linear(weight, None), with_outliers(14, 96, [3, 90])
    exact = x @ (layer.weight * layer.scale).T
    errors = [
        distance(llm_int8_reference(x, layer.weight, layer.scale, threshold), exact)
        for threshold in (6.0, float("inf"))
    ]
    assert 5 * errors[0] < 0.01 < errors[1]


def test_llm_int8_row_of_zeros_is_zero() -> None:
    assert torch.equal(LlmInt8Linear(torch.randn(40, 96), None)(torch.zeros(3, 96)), torch.zeros(3, 40))


def test_llm_int8_run_has_the_loss_of_int8(zygote: Zygote, tmp_path: Path) -> None:
    losses = []
    for kind in ("int8", "llm_int8"):
        run = tmp_path / kind
        words = ("recipe=lora", f"quantization={kind}", "training.max_steps=3", f"output_dir={run}")
        ended = zygote.finish(tmp_path, *SMALL, *words)
        assert f"{kind} base, fp32 on cpu" in ended.stdout
        memory = result(run)
        assert memory["memory_predicted_bytes"] == pytest.approx(memory["memory_measured_bytes"], rel=0.01)
        losses.append(memory["eval_loss"])
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


def test_int8_scale_is_product_with_reciprocal() -> None:
    """To the bit, as a GPU divides by a number: both devices have the same scales."""
    weight = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
    largest = weight.half().float().abs().amax(1, keepdim=True)
    assert torch.equal(Int8Linear(weight, None).scale, largest * torch.tensor(1 / 127))


def test_nf4_evaluation_leaves_base_and_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a CPU with avx512_bf16, on which bitsandbytes rearranges weights at the first evaluation
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    built("llama", "eager", **wide_numbers("llama")).save_pretrained(str(tmp_path))
    training_model = build_model(parts_of(model=wide(path=str(tmp_path))), CPU, 0, "base")
    adapted = {type(m).__module__ for m in training_model.network.modules() if type(m).__name__ == "Linear4bit"}
    assert adapted == {"bitsandbytes.nn.modules", "peft.tuners.lora.bnb"}, "PEFT was not told"

    base, before = packed_bytes(training_model.network), outcome(training_model, BATCH)
    training_model.eval()
    with torch.no_grad():
        training_model(batch_of(documents_of((8, 5))))
    training_model.train()
    after = outcome(training_model, BATCH)
    assert after[0] == before[0]
    assert same(after[1], before[1])
    for parameter in training_model.trained().values():
        parameter.data -= 0.1 * parameter.grad  # type: ignore[operator]
    outcome(training_model, BATCH)
    assert same(packed_bytes(training_model.network), base)


@pytest.mark.parametrize("base", ["fp8", "llm_int8"])
@pytest.mark.parametrize("kind", WITH_EXPERTS)
def test_stacked_experts_with_rounded_inputs_are_refused(kind: str, base: str) -> None:
    parts = sections(wide(kind), lora(), quantization=QuantizationConfig(kind=base))
    with pytest.raises(ConfigError, match=f"a model of kind {kind} .*: its experts are stacked, and stacks cannot be"):
        count_weights(parts)
    integers = sections(wide(kind), lora(), quantization=QuantizationConfig(kind="int8"))
    assert count_weights(integers).trained == count_weights(sections(wide(kind), lora())).trained


def test_nf4_stack_larger_than_kernels_count_is_refused() -> None:
    model = wide(architecture=wide_numbers("mixtral", intermediate_size=1 << 22))
    with pytest.raises(ConfigError, match=r"nf4: .*experts\.gate_up_proj has 2,147,483,648 weights, and kernels of"):
        count_weights(parts_of(model=model))


def test_nf4_rows_of_no_whole_blocks_are_refused() -> None:
    parts = parts_of(model=wide(architecture=wide_numbers("llama", intermediate_size=96)))
    words = (
        r"quantization\.kind=nf4: .*layers\.0\.mlp\.down_proj has 96 inputs, not a multiple of 64.* Set recipe=lora or"
    )
    for way in (lambda: count_weights(parts), lambda: build_model(parts, CPU, 0, "base")):
        with pytest.raises(ConfigError, match=words):
            way()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_count_weights_counts_nf4_weights_not_bytes(kind: str) -> None:
    found, plain = (count_weights(parts) for parts in (parts_of(kind), sections(wide(kind), lora())))
    assert found == plain
    whole = count_weights(sections(wide(kind), full()))
    assert found.total == whole.total + found.trained
    assert found.trained == sum(p.numel() for p in qlora(kind).trained().values())


def test_nf4_dtypes_follow_precision_and_adapter_is_fp32() -> None:
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        training_model = qlora(precision=precision)
        frozen = {p.dtype for p in training_model.network.parameters() if not p.requires_grad}
        assert frozen == {torch.uint8, dtype}
        assert {p.dtype for p in training_model.trained().values()} == {torch.float32}
        assert {layer.compute_dtype for _, layer in packed_layers(training_model.network)} == {dtype}


WEIGHT = torch.randn(48, 256, generator=torch.Generator().manual_seed(0))


def numbers_of(exponent_bits: int, mantissa_bits: int) -> Tensor:
    """All values of a small float without infinities, from its bit layout."""
    bias = 2 ** (exponent_bits - 1) - 1
    values = {0.0}
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            value = (1 + fraction) * 2 ** (exponent - bias) if exponent else fraction * 2 ** (1 - bias)
            values |= {value, -value}
    return torch.tensor(sorted(values))


def nearest(groups: Tensor, numbers: Tensor) -> Tensor:
    """By brute force, the largest number at the largest weight of a group."""
    scale = groups.abs().amax(1, keepdim=True) / numbers.max()
    return numbers[(groups[..., None] / scale[..., None] - numbers).abs().argmin(-1)] * scale


def by_4bit_layer(kind: str, weight: Tensor) -> Tensor:
    return dequantized(linear_4bit(weight, None, kind, double_quant=False, compute=torch.float32))


def by_fp8_layer(weight: Tensor) -> Tensor:
    rounded, scale = quantize_reference(weight)
    return rounded.float() * scale


INTEGERS = torch.arange(-127, 128).float()
REFERENCES = {
    "int8, a scale for the layer": nearest(WEIGHT.view(1, -1), INTEGERS).view_as(WEIGHT),
    "int8, for a row": nearest(WEIGHT, INTEGERS),
    "int8, for 64 weights": nearest(WEIGHT.view(-1, 64), INTEGERS).view_as(WEIGHT),
    "E4M3, for a row": by_fp8_layer(WEIGHT),
    "E5M2, for a row": nearest(WEIGHT, numbers_of(5, 2)[4:-4]),  # its last exponent is for infinities
    "NF4, for 64 weights": by_4bit_layer("nf4", WEIGHT),
    "E2M1, for 64 weights": nearest(WEIGHT.view(-1, 64), numbers_of(2, 1)).view_as(WEIGHT),
    "E3M0, for 64 weights": nearest(WEIGHT.view(-1, 64), numbers_of(3, 0)).view_as(WEIGHT),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_format_equals_its_definition(name: str) -> None:
    found, expected = NUMBER_FORMATS[name].dequantized(WEIGHT), REFERENCES[name]
    differ = (found - expected).abs() > 1e-5
    assert differ.float().mean() < 1e-3  # numbers halfway between two
    assert float((found - WEIGHT).norm()) == pytest.approx(float((expected - WEIGHT).norm()), rel=1e-3)


def test_asymmetric_integers_reach_both_ends() -> None:
    weight = WEIGHT + 3  # all of one sign: half of the symmetric integers are idle
    found = {
        name: NUMBER_FORMATS[name].dequantized(weight) for name in NUMBER_FORMATS if name.startswith("int8, for a row")
    }
    asymmetric = found["int8, for a row, asymmetric"]
    assert torch.allclose(asymmetric.amin(1), weight.amin(1), atol=1e-5)
    assert torch.allclose(asymmetric.amax(1), weight.amax(1), atol=1e-5)
    assert (asymmetric - weight).norm() < 0.8 * (found["int8, for a row"] - weight).norm()


def test_one_outlier_spoils_only_its_group() -> None:
    weight = WEIGHT.clone()
    weight[3, 5] = 50.0
    (layer,) = quantization_errors([("mlp.up_proj", weight)])["layers"]
    errors = layer["errors"]
    assert errors["int8, a scale for the layer"] > 5 * errors["int8, for a row"] > 5 * errors["int8, for 64 weights"]
    for kind in ("NF4", "FP4"):
        assert (
            errors[f"{kind}, for 64 weights"] < errors[f"{kind}, for 128 weights"] < errors[f"{kind}, for 256 weights"]
        )
    assert layer["outlier_share"] == pytest.approx(1 / weight.numel())
    assert layer["largest_in_stds"] == pytest.approx(50 / float(weight.std()))


def test_errors_of_layers_make_that_of_the_model() -> None:
    weights = [("a", WEIGHT), ("b", 10 * WEIGHT.T[:100])]  # rows of 48: groups of 64 go over their ends
    facts = quantization_errors(iter(weights))
    by_name = {each["format"]: each for each in facts["formats"]}
    assert by_name.keys() == NUMBER_FORMATS.keys()
    for name, each in NUMBER_FORMATS.items():
        difference = sum(float((each.dequantized(weight) - weight).norm()) ** 2 for _, weight in weights) ** 0.5
        whole = sum(float(weight.norm()) ** 2 for _, weight in weights) ** 0.5
        assert by_name[name]["error"] == pytest.approx(difference / whole, rel=1e-5)
    assert facts["weights"] == 48 * 256 + 4800
    assert by_name["NF4, for 64 weights"]["bits_per_weight"] == 4.5
    assert by_name["int8, for a row"]["bits_per_weight"] == pytest.approx(8 + 32 * (48 + 100) / facts["weights"])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_linear_weights_are_those_that_would_be_quantized(kind: str) -> None:
    options = LoadOptions(torch.float32, torch.device("cpu"), "eager")
    base = open_weights(model_config(kind), TASKS["causal"], options, seed=1)
    found = dict(base.linear_weights())
    lm = open_weights(model_config(kind), TASKS["causal"], options, seed=1).whole()
    assert len(found) == (14 if kind == "llama" else 8)
    for name, weight in found.items():
        own = lm.get_submodule(name).weight
        assert weight.equal(own.T if kind == "gpt2" else own)


ROWS = documents_of((12, 9))


@pytest.mark.parametrize("scheme", ["int4", "int8da_int4"])
def test_final_model_quantized_by_torchao_has_the_loss_of_training(scheme: str, tmp_path: Path) -> None:
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
    assert "Trained for quantization by torchao to int4" in (run / "final" / "README.md").read_text()
    memory = result(run)
    assert memory["memory_predicted_bytes"] == pytest.approx(memory["memory_measured_bytes"], rel=0.01)
