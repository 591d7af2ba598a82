"""4-bit formats of published models on a GPU: the bits of a CPU, and products of the dequantized weight."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from app.layers.packed_linear import PackedLinear, PackedWeight, round_to_int4, round_to_mxfp4, round_to_nvfp4
from tests.model.small import distance

OUTPUTS, INPUTS = 4096, 14336
GPU = torch.device("cuda")


def with_order(weight: Tensor) -> PackedWeight:
    """Return int4 with zero points and groups of inputs in another order."""
    packed, generator = round_to_int4(weight, 128, torch.float16), torch.Generator().manual_seed(1)
    zero = torch.randint(-8, 8, packed.scale.shape, generator=generator, dtype=torch.int8)
    group = torch.arange(INPUTS, dtype=torch.int32).div_(128, rounding_mode="floor")
    return replace(packed, zero=zero, group=group[torch.randperm(INPUTS, generator=generator)])


FORMATS = {
    "int4": partial(round_to_int4, group=128, scale_dtype=torch.bfloat16),
    "int4_order": with_order,
    "mxfp4": round_to_mxfp4,
    "nvfp4": round_to_nvfp4,
}


@pytest.mark.parametrize("to_packed", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_weight_on_gpu_has_the_bits_of_a_cpu_and_its_products(
    to_packed: Callable[[Tensor], PackedWeight], dtype: torch.dtype
) -> None:
    packed = to_packed(torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0)))
    layer = PackedLinear(packed.to(GPU), None)
    weight = packed.unpacked(dtype)
    assert torch.equal(layer.unpacked(dtype).cpu(), weight)
    rows = torch.randn(256, INPUTS, device=GPU, dtype=dtype, requires_grad=True)
    above = torch.randn(256, OUTPUTS, device=GPU, dtype=dtype)
    product = layer(rows)
    (back,) = torch.autograd.grad(product, rows, above)
    exact, allowed = weight.to(GPU).double(), 1e-5 if dtype == torch.float32 else 5e-3
    assert distance(product.detach().double(), rows.detach().double() @ exact.T) <= allowed
    assert distance(back.double(), above.double() @ exact) <= allowed
