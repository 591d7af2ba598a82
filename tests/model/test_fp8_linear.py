"""A base in fp8: bytes, products and gradients of rows against float64, and the model around it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from app.base.tokenizer import load_tokenizer
from app.config.schema import QuantizationConfig
from app.errors import ConfigError, EnvironmentProblem
from app.finished.inference import load_tuned
from app.finished.save import save_base, save_model
from app.layers import frozen_linear
from app.layers.frozen_linear import (
    E4M3,
    Fp8Linear,
    compare_products,
    quantize_reference,
    quantize_rows,
    without_row_rounding,
)
from app.layers.quantization import Fp8, missing_hardware
from app.model.build import random_base
from app.model.training_model import TrainingModel
from tests.harness.marks import requires_interpreter
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
    three_steps,
    training_model_of,
    wide_numbers,
)

CPU = torch.device("cpu")
FP8 = QuantizationConfig(kind="fp8")
DENSE = ("llama", "gpt2")
IDS = documents_of((10,))[0][None]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(outputs: int = 64, inputs: int = 256) -> tuple[Fp8Linear, Tensor, Tensor]:
    """A layer, its weight and its bias."""
    weight, bias = random(outputs, inputs), random(outputs, seed=1)
    return Fp8Linear(weight, nn.Parameter(bias)), weight, bias


def fp8_layers(network: nn.Module) -> dict[str, Fp8Linear]:
    return {name: module for name, module in network.named_modules() if isinstance(module, Fp8Linear)}


def eight(kind: str = "llama", precision: str = "fp32", **given: Any) -> TrainingModel:
    return training_model_of(kind, given.pop("adapter", lora()), precision, quantization=FP8, **given)


def test_quantize_rows_nearest_e4m3_at_scale_of_row() -> None:
    rows = random(8, 96) * torch.logspace(-6, 6, 8)[:, None]
    found, scales = quantize_rows(rows)
    assert (found.dtype, scales.dtype, scales.shape) == (E4M3, torch.float32, (8, 1))
    assert torch.allclose(scales[:, 0], rows.abs().amax(1) / 448, rtol=1e-6)
    back = found.double() * scales.double()
    largest = rows.abs().amax(1, keepdim=True).double()
    apart = (back - rows.double()).abs()
    # half of the distance of neighbors: 2^-4 of a number, and the same everywhere among the subnormal ones
    assert bool((apart <= torch.maximum(rows.double().abs() * 2**-4, largest / 448 * 2**-10) * 1.00001).all())
    assert found.float().abs().amax(1).tolist() == [448.0] * 8


def test_quantize_rows_zero_and_non_finite_rows() -> None:
    rows = torch.zeros(3, 16)
    rows[1, 3], rows[2, 5] = float("nan"), float("inf")
    found, scales = quantize_rows(rows)
    assert not found[0].float().any()
    assert bool(scales[0] > 0)
    assert [bool((found[i].float() * scales[i]).isfinite().all()) for i in range(3)] == [True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_layer_equals_float64_of_rounded_numbers(dtype: torch.dtype) -> None:
    layer, weight, bias = linear()
    x = random(2, 5, 256, seed=2).to(dtype).requires_grad_()
    out = layer(x)
    given = random(2, 5, 64, seed=3).to(dtype)
    out.backward(given)
    assert (out.dtype, x.grad.dtype, x.grad.shape) == (dtype, dtype, x.shape)  # type: ignore[union-attr]

    def rounded(rows: Tensor) -> Tensor:
        found, scales = quantize_reference(rows)
        return found.double() * scales.double()

    expected = rounded(x.detach().flatten(0, 1)) @ rounded(weight).T + bias.double()
    back = rounded(given.flatten(0, 1)) @ rounded(weight.T.contiguous()).T
    allowed = 1e-6 if dtype == torch.float32 else 3e-3
    assert distance(out.detach().flatten(0, 1), expected) <= allowed
    assert distance(x.grad.flatten(0, 1), back) <= allowed  # type: ignore[union-attr]
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_fp8_layer_error_is_that_of_fp8() -> None:
    """0.026 for weights alone, 0.037 with the rows rounded too, on numbers like those of a model."""
    weight, x = random(512, 1024), random(256, 1024, seed=1)
    layer, exact = Fp8Linear(weight, None), x.double() @ weight.double().T
    assert 0.025 < distance(x @ layer.unpacked(torch.float32).T, exact) < 0.028
    assert 0.035 < distance(layer(x), exact) < 0.039
    given = random(256, 512, seed=2)
    assert 0.035 < distance(layer.back(given), given.double() @ weight.double()) < 0.039
    both = [layer.weight, layer.weight_back]
    assert sum(each.nbytes for each in both) == weight.bfloat16().nbytes
    before = [each.clone() for each in both]
    layer.to(torch.float16).float()
    assert all(torch.equal(each, was) for each, was in zip(both, before, strict=True)), "bytes are not cast"


@pytest.mark.parametrize("kind", DENSE)
def test_fp8_base_has_backbone_in_fp8_and_head_as_before(kind: str) -> None:
    training_model = eight(kind, "bf16")
    found = fp8_layers(training_model.network)
    plain = training_model_of(kind, lora(), "bf16", model=model_config(kind, architecture=wide_numbers(kind)))
    known = dict(plain.language_model.base_model.named_modules())
    expected = {n for n, m in known.items() if n.endswith("base_layer")}
    inside = {n.split("base_model.model.", 1)[1].split(".", 1)[1] for n in found}
    assert inside == expected
    assert {p.dtype for p in training_model.trained().values()} == {torch.float32}
    frozen = {p.dtype for p in training_model.network.parameters() if not p.requires_grad}
    assert frozen == {torch.uint8, torch.bfloat16}
    assert training_model.language_model.get_output_embeddings().weight.dtype == torch.bfloat16
    assert list(training_model.trained()) == list(plain.trained()), "names stay PEFT's"
    kinds = {type(m).__module__ for m in training_model.network.modules() if hasattr(m, "lora_A")}
    assert kinds == {"peft.tuners.lora.layer"}


def dequantized(training_model: TrainingModel, kind: str = "llama") -> TrainingModel:
    """The model in plain linear layers that have the rounded weights."""
    model = model_config(kind, architecture=wide_numbers(kind))
    plain = training_model_of(kind, lora(), model=model)
    found, given = fp8_layers(training_model.network), dict(training_model.network.named_parameters())
    for name, parameter in plain.network.named_parameters():
        layer = found.get(name.removesuffix(".weight"))
        source = given[name] if layer is None else layer.unpacked(torch.float32)
        parameter.data = source.detach().to(parameter.dtype).clone()
    return plain


def test_fp8_without_row_rounding_equals_rounded_weights() -> None:
    training_model, batch = eight(), batch_of(documents_of((12, 9)))
    plain = outcome(dequantized(training_model), batch)
    with without_row_rounding(training_model.network):
        exact = outcome(training_model, batch)
    assert exact[0] == pytest.approx(plain[0], rel=1e-5)
    assert distance(exact[1], plain[1]) <= 1e-5
    rounded = outcome(training_model, batch)
    assert 1e-4 < distance(rounded[1], plain[1]) < 0.5


def test_fp8_adapter_saved_for_ordinary_base(tmp_path: Path) -> None:
    model = model_config(architecture=wide_numbers("llama"))
    parts = sections(model, lora(), quantization=FP8)
    training_model = three_steps(build_model(parts, CPU, 0, str(tmp_path / "base")))
    tokenizer = load_tokenizer(model, needs_template=True)
    base = random_base(parts, CPU, 0)
    assert base is not None
    save_base(training_model, tokenizer, tmp_path / "base", base)
    save_model(training_model, tokenizer, tmp_path / "final")
    with torch.no_grad():
        trained = training_model.language_model.eval()(IDS).logits
        later = load_tuned(tmp_path, model, CAUSAL, adapter=True, quantization=FP8)
        plain = load_tuned(tmp_path, model, CAUSAL, adapter=True)
        assert not fp8_layers(later)
        assert later(IDS).logits.equal(plain(IDS).logits)
        assert 1e-4 < distance(later(IDS).logits, trained) < 0.2
    again = build_model(sections(model_config(path=str(tmp_path / "base")), lora(), quantization=FP8), CPU, 0, "base")
    ours, theirs = fp8_layers(training_model.network), fp8_layers(again.network)
    assert ours.keys() == theirs.keys()
    for name, layer in ours.items():
        assert torch.equal(layer.weight, theirs[name].weight), name
        assert torch.equal(layer.weight_back, theirs[name].weight_back), name


def test_fp8_sizes_of_no_kernel_are_refused() -> None:
    narrow = model_config(architecture=wide_numbers("llama", intermediate_size=120))
    with pytest.raises(ConfigError, match=r"quantization.kind=fp8: .*120 outputs, not both multiples of 16"):
        build_model(sections(narrow, lora(), quantization=FP8), CPU, 0, "base")


@pytest.mark.parametrize(("capability", "refused"), [((8, 0), True), ((8, 9), False), ((9, 0), False)])
def test_fp8_gpu_without_fp8_is_refused(
    capability: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA Card")
    missing = missing_hardware(FP8, torch.device("cuda", 0))
    assert (missing is not None) == refused
    if missing is not None:
        assert missing.startswith("quantization.kind=fp8 needs an NVIDIA GPU of compute capability 8.9 or higher")
        assert "this NVIDIA Card has 8.0. Set quantization=none" in missing


def test_fp8_notes_cpu_is_slow() -> None:
    assert Fp8().notes("cuda") == []
    (note,) = Fp8().notes("cpu")
    assert note.startswith("quantization=fp8: a CPU has no fp8")


def test_compare_products_each_size_passes() -> None:
    proofs = compare_products(eight().network)
    assert len(proofs) == 8, "q and o, k and v, gate and up, down: forward and back"
    assert all(proof.passed for proof in proofs)
    assert compare_products(training_model_of("llama", lora()).network) == []


@pytest.mark.parametrize("wrong", ["scales", "layout", "raises"])
def test_compare_products_wrong_product_is_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = frozen_linear.product
    network = nn.ModuleDict({"a": linear(64, 64)[0]})

    def spoilt(rows: Any, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        if wrong == "raises":
            raise RuntimeError("Expected both\ndimensions")
        if wrong == "scales":
            scales = scales.roll(1)
        return real(rows, weight.T.contiguous() if wrong == "layout" else weight, scales, dtype)

    monkeypatch.setattr(frozen_linear, "product", spoilt)
    with pytest.raises(EnvironmentProblem, match=r"quantization.kind=fp8: .*Set quantization=none") as refusal:
        compare_products(network)
    assert wrong != "raises" or "Expected both dimensions" in str(refusal.value)


def test_fp8_layouts_pass_shape_rules_of_cuda() -> None:
    layer = linear(64, 256)[0].to("meta")
    for weight, scale in ((layer.weight, layer.scale), (layer.weight_back, layer.scale_back)):
        outputs, inputs = weight.shape
        rows = torch.empty(5, inputs, dtype=E4M3, device="meta")
        of_rows = torch.empty(5, 1, device="meta")
        out = frozen_linear.product_on_gpu(rows, of_rows, weight.view(E4M3), scale, torch.float32)
        assert (out.shape, out.dtype) == ((5, outputs), torch.float32)
        with pytest.raises(RuntimeError, match="col_major"):
            frozen_linear.product_on_gpu(rows, of_rows, weight.view(E4M3).T, scale, torch.bfloat16)


def rows_of_many_sizes(width: int, dtype: torch.dtype) -> Tensor:
    rows = random(6, width, seed=width) * torch.logspace(-4, 4, 6)[:, None]
    rows[2] = 0
    return rows.to(dtype)


def by_kernel(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Run in Triton's interpreter. Its casts are its own (bf16 is cut off, e4m3 forgets to carry), so the arithmetic
    is compared before its last step, rounded to float32.
    """
    from app.layers.triton_kernels import quantize_rows as launch

    out, scales = torch.empty_like(rows, dtype=dtype), torch.empty(len(rows), 1)
    launch(rows, out, scales, 1e-12, 448.0)
    return out.float(), scales


def scaled(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_reference` before it rounds: the numbers and their scales."""
    wide = rows.float()
    largest = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return (wide * (torch.full_like(largest, 448.0) / largest)).clamp(-448, 448), largest * (1 / 448)


@requires_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantize_kernel_equals_reference_to_the_bit(dtype: torch.dtype) -> None:
    rows = rows_of_many_sizes(96, dtype)
    for found, expected in zip(by_kernel(rows, torch.float32), scaled(rows), strict=True):
        assert torch.equal(found, expected)
    bytes_, scales = quantize_reference(rows)
    assert torch.equal(scaled(rows)[0].to(E4M3).float(), bytes_.float()), "the same as the reference"
    assert torch.equal(scaled(rows)[1], scales)


@requires_interpreter
def test_quantize_kernel_keeps_non_finite() -> None:
    rows = rows_of_many_sizes(48, torch.float32)
    rows[1, 3], rows[4, 5] = float("nan"), float("inf")
    with np.errstate(invalid="ignore"):  # infinity times 0, as meant
        out, scales = by_kernel(rows, torch.float32)
    assert (out * scales).isfinite().all(1).tolist() == [True, False, True, True, False, True]


class _CompilationError(Exception):
    """Begins with a place in the source, as Triton's does."""

    error_message = "no such cast\non this card"

    def __str__(self) -> str:
        return f"at 3:4:\n    y = x.to(kind)\n{self.error_message}"


def _raise(_rows: Tensor) -> Any:
    raise _CompilationError


def _other_bytes(rows: Tensor) -> Any:
    out, scales = quantize_reference(rows)
    return out.float().roll(1, 1).to(out.dtype), scales


@pytest.mark.parametrize(("wrong", "words"), [(_raise, r"\(no such cast on this card\)"), (_other_bytes, "differs by")])
def test_compare_products_wrong_kernel_is_refused(wrong: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_linear, "quantize_rows", wrong)
    with pytest.raises(EnvironmentProblem, match=rf"quantization.kind=fp8: .*{words}.*Set quantization=none"):
        compare_products(eight().network)


@pytest.mark.parametrize("count", [1, 256, 300])
def test_scales_end_with_a_tile_of_the_product(count: int) -> None:
    """Products of torch read the scales of whole tiles."""
    for scales in (quantize_rows(random(count, 32))[1], quantize_reference(random(count, 32))[1]):
        assert (scales.shape, scales.is_contiguous()) == ((count, 1), True)
        assert scales.untyped_storage().nbytes() == 4 * 256 * -(-count // 256)
