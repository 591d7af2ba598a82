"""Number formats against their definitions, bitsandbytes and torch; errors of layers."""

import pytest
import torch
from torch import Tensor

from app.base.base_model import open_weights
from app.base.base_weights import LoadOptions
from app.config.tasks import TASKS
from app.layers.frozen_linear import quantize_reference
from app.layers.nf4 import dequantized, linear_4bit
from app.layers.quantization import NUMBER_FORMATS, quantization_errors
from tests.model.small import model_config

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
def test_linear_weights_are_those_that_would_be_quantised(kind: str) -> None:
    options = LoadOptions(torch.float32, torch.device("cpu"), "eager")
    base = open_weights(model_config(kind), TASKS["causal"], options, seed=1)
    found = dict(base.linear_weights())
    lm = open_weights(model_config(kind), TASKS["causal"], options, seed=1).whole()
    assert len(found) == (14 if kind == "llama" else 8)
    for name, weight in found.items():
        own = lm.get_submodule(name).weight
        assert weight.equal(own.T if kind == "gpt2" else own)
