"""E2M1 with block scales, MXFP4 and NVFP4: layers, expert stacks, and folders that store them."""

from typing import Any

import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import MXFP4A16, NVFP4A16
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor, nn

from app.config.schema import QuantizationConfig
from app.layers.packed_linear import GROUPS, MXFP4, NVFP4, PackedLinear, PackedWeight, global_scales
from app.layers.quantization import Mxfp4, Nvfp4, quantizer_of
from tests.model.small import distance

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
