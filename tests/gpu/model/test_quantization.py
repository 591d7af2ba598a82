"""NF4, FP4 and int8 on a GPU: dequantised weights, and fused layers multiply by what is there."""

import pytest
import torch
from torch import nn

from app.model.frozen_linear import Int8Linear
from app.model.kernels import product_in_float32
from app.model.nf4 import DequantizeBuffer, dequantized
from app.model.quantization import Bits4
from tests.model.small import distance

SHAPES = ((1024, 4096), (14336, 4096), (4096, 14336))  # outputs, inputs


def packed_layer(outputs: int, inputs: int, dtype: torch.dtype, kind: str = "nf4", *, double: bool = True) -> nn.Module:
    layer = nn.Linear(inputs, outputs, bias=False, device="cuda", dtype=dtype)
    return Bits4(kind, double_quant=double, compute=dtype).quantized(layer)


@pytest.mark.parametrize(("kind", "double"), [("nf4", False), ("nf4", True), ("fp4", True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dequantize_buffer_equals_bitsandbytes(dtype: torch.dtype, kind: str, *, double: bool) -> None:
    layers = [packed_layer(*shape, dtype, kind, double=double) for shape in SHAPES]
    buffer = DequantizeBuffer(layers)
    for layer in (*layers, layers[0]):
        assert torch.equal(buffer.dequantized(layer, dtype), dequantized(layer))


def test_nf4_products_equal_float64() -> None:
    outputs, inputs = SHAPES[1]
    layer = packed_layer(outputs, inputs, torch.bfloat16)
    weight = dequantized(layer).double()
    rows = torch.randn(2048, inputs, device="cuda", dtype=torch.bfloat16)
    above = torch.randn(2048, outputs, device="cuda", dtype=torch.bfloat16)
    frozen = Bits4("nf4", double_quant=True, compute=torch.bfloat16).fused_forms(layer)[layer]
    with torch.no_grad():
        product, back = frozen.product(rows), frozen.back(above)
    assert distance(product.double(), rows.double() @ weight.T) <= 4e-3
    assert distance(back.double(), above.double() @ weight) <= 4e-3


def test_nf4_survives_the_way_to_the_gpu_and_back() -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weights = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    results: list[torch.Tensor] = []
    for device in ("cpu", "cuda"):
        packed, state = quantize_4bit(weights.to(device), blocksize=64, quant_type="nf4")
        results.append(dequantize_4bit(packed, state).cpu())
    on_cpu, on_gpu = results
    assert torch.allclose(on_cpu, on_gpu, atol=1e-6)
    assert 0 < (on_cpu - weights).norm() / weights.norm() < 0.15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_int8_bytes_and_products_equal_those_of_a_cpu(dtype: torch.dtype) -> None:
    weight = torch.randn(4096, 14336, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(dtype)
    on_cpu, layer = Int8Linear(weight, None), Int8Linear(weight.cuda(), None)
    assert (on_cpu.weight.int() - layer.weight.cpu().int()).abs().max() <= 1, "a number half way between two"
    assert torch.equal(on_cpu.scale, layer.scale.cpu())
    exact = layer.weight.double() * layer.scale.double()
    rows = torch.randn(2048, 14336, device="cuda", dtype=dtype)
    above = torch.randn(2048, 4096, device="cuda", dtype=dtype)
    allowed = 1e-5 if dtype == torch.float32 else 6e-3
    with torch.no_grad():
        assert distance(layer.product(rows).double(), rows.double() @ exact.T) <= allowed
        assert distance(layer.back(above).double(), above.double() @ exact) <= allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_product_in_float32_is_not_rounded(dtype: torch.dtype) -> None:
    left = torch.randn(4096, 16, device="cuda", dtype=dtype).T
    right = torch.randn(4096, 512, device="cuda", dtype=dtype)
    found = product_in_float32(left, right)
    assert found.dtype == torch.float32
    assert distance(found.double(), left.double() @ right.double()) < 1e-5


@pytest.mark.parametrize("count", [1, 4, 5])
def test_few_rows_of_nf4_equal_float64(count: int) -> None:
    layer = packed_layer(*SHAPES[0], torch.bfloat16)
    frozen = Bits4("nf4", double_quant=True, compute=torch.bfloat16).fused_forms(layer)[layer]
    rows = torch.randn(count, SHAPES[0][1], device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        found = frozen.product(rows)
    assert distance(found.double(), rows.double() @ dequantized(layer).double().T) <= 5e-3
