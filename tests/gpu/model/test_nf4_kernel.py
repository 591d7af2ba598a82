"""Weights of four bits unpacked by the kernel and by plain torch, to the last bit as bitsandbytes unpacks them."""

import pytest
import torch
from torch import nn

from app.model.fused.unpacking import share_scratch
from app.model.kernels.nf4 import Packed, unpack_plain
from app.model.quantize import FourBit
from tests.model.small import distance
from tests.model.test_nf4_kernel import DTYPES, LLAMAS, odd, of_bitsandbytes, packed_weight


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LLAMAS)
def test_the_kernel_on_a_gpu(shape: tuple[int, int], dtype: torch.dtype, *, double: bool) -> None:
    weight = packed_weight(*shape, dtype, "cuda", double=double)
    found = torch.empty(shape, dtype=dtype, device="cuda")
    Packed.of(weight).into(found)
    assert torch.equal(found, of_bitsandbytes(weight))
    packed, count = odd(Packed.of(weight))
    part, plain = (torch.empty(count, dtype=dtype, device="cuda") for _ in range(2))
    packed.into(part)
    unpack_plain(packed, plain)
    assert torch.equal(part, plain)


def test_products_on_a_gpu_against_float64() -> None:
    from app.model.fused.frozen import FourBits

    outputs, inputs = LLAMAS[1]
    layer = nn.Sequential(nn.Linear(inputs, outputs, bias=False, device="cuda", dtype=torch.bfloat16))
    FourBit("nf4", double_quant=True, compute=torch.bfloat16).pack(layer)
    assert share_scratch(layer, torch.bfloat16).remarks == ()
    weight = of_bitsandbytes(layer[0].weight).double()
    rows = torch.randn(2048, inputs, device="cuda", dtype=torch.bfloat16)
    above = torch.randn(2048, outputs, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        product, back = FourBits(layer[0]).product(rows), FourBits(layer[0]).back(above)
    assert distance(product.double(), rows.double() @ weight.T) <= 4e-3
    assert distance(back.double(), above.double() @ weight) <= 4e-3
