"""NF4, FP4, int8 and LLM.int8() on a GPU: layers multiply by what their bytes say."""

import pytest
import torch
from torch import nn

from app.layers.frozen_linear import Int8Linear, LlmInt8Linear
from app.layers.nf4 import dequantized, install_forward
from app.layers.operations import COSTS
from app.layers.quantization import Bits4
from tests.model.small import distance

SHAPES = ((1024, 4096), (14336, 4096), (4096, 14336))  # outputs, inputs


def packed_layer(outputs: int, inputs: int, kind: str) -> nn.Module:
    layer = nn.Linear(inputs, outputs, bias=False, device="cuda", dtype=torch.bfloat16)
    holder = nn.Sequential(Bits4(kind, double_quant=True, compute=torch.bfloat16).quantized(layer))
    install_forward(holder)
    return holder[0]


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("count", [1, 4, 5, 2048])  # up to 4 rows have a kernel of their own
def test_products_of_four_bits_equal_float64(count: int, kind: str) -> None:
    outputs, inputs = SHAPES[1]
    layer = packed_layer(outputs, inputs, kind)
    weight = dequantized(layer).double()
    rows = torch.randn(count, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    above = torch.randn(count, outputs, device="cuda", dtype=torch.bfloat16)
    product = layer(rows)
    (back,) = torch.autograd.grad(product, rows, above)
    assert distance(product.detach().double(), rows.detach().double() @ weight.T) <= 5e-3
    assert distance(back.double(), above.double() @ weight) <= 5e-3


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


@pytest.mark.parametrize("columns", [[], [7, 4000]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_llm_int8_products_equal_those_of_a_cpu(dtype: torch.dtype, columns: list[int]) -> None:
    random = torch.Generator().manual_seed(0)
    on_cpu = LlmInt8Linear(torch.randn(1024, 4096, generator=random), None)
    layer = LlmInt8Linear(torch.randn(1, 1), None)
    layer.weight, layer.scale = torch.nn.Parameter(on_cpu.weight.cuda(), requires_grad=False), on_cpu.scale.cuda()
    x = torch.randn(515, 4096, generator=random).clamp_(-5, 5)
    x[::2, columns] = 40.0
    x = x.to(dtype)
    above = torch.randn(515, 1024, generator=random).to(dtype)
    rows = x.cuda().requires_grad_()
    product = layer(rows)
    (back,) = torch.autograd.grad(product, rows, above.cuda())
    allowed = 1e-3 if dtype != torch.bfloat16 else 6e-3  # bitsandbytes writes its products in float16
    with torch.no_grad():
        assert distance(product.cpu().double(), on_cpu(x).double()) <= allowed
        assert distance(back.cpu().double(), on_cpu.back(above).double()) <= allowed


@pytest.mark.parametrize("size", [(40, 96), (4, 4)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 17])
def test_llm_int8_products_of_small_sizes_equal_those_of_a_cpu(count: int, size: tuple[int, int]) -> None:
    random = torch.Generator().manual_seed(0)
    weight, x = torch.randn(size, generator=random), torch.randn(count, size[1], generator=random)
    x[0, 2] = 40.0
    on_cpu, on_gpu = LlmInt8Linear(weight, None), LlmInt8Linear(weight.cuda(), None)
    assert distance(on_gpu(x.cuda()).cpu().double(), on_cpu(x).double()) <= 2e-2


@pytest.mark.parametrize("outputs", [1024, 8192])
def test_llm_int8_product_allocates_the_bytes_of_the_plan(outputs: int) -> None:
    layer, rows = LlmInt8Linear(torch.randn(outputs, 4096, device="cuda"), None), torch.ones(1024, 4096, device="cuda")
    rows = rows.bfloat16()
    layer.product(rows)  # cuBLAS allocates its workspace
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = layer.product(rows)
    allocated = torch.cuda.max_memory_allocated() - before
    cost = COSTS["app_kernels::llm_int8_product"]
    assert cost.gpu_bytes is not None
    assert allocated == pytest.approx(out.nbytes + cost.gpu_bytes(rows, layer.weight), rel=0.02)
