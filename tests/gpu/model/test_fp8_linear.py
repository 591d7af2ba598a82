"""fp8 on a GPU: products as a CPU makes them, rows rounded by the kernel as torch rounds them."""

import pytest
import torch

from app.layers import frozen_linear
from app.layers.frozen_linear import Fp8Linear, quantize_by_kernel, quantize_reference
from tests.model.small import distance
from tests.model.test_fp8_linear import random, rows_of_many_sizes


def test_fp8_layer_equals_cpu() -> None:
    layer = Fp8Linear(random(4096, 1024), None)
    x, given = random(300, 1024, seed=1).bfloat16(), random(300, 4096, seed=2).bfloat16()
    here, back = layer(x.float()), layer.back(given.float())
    layer.cuda()
    assert all(proof.passed for proof in frozen_linear.compare_products(layer))
    assert distance(layer(x.cuda()).float().cpu(), here) < 0.02
    assert distance(layer.back(given.cuda()).float().cpu(), back) < 0.02


@pytest.mark.parametrize("width", [16, 4096, 14336, 53248])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize_kernel_equals_reference_to_the_bit(width: int, dtype: torch.dtype) -> None:
    rows = rows_of_many_sizes(width, dtype).cuda()
    ours, theirs = quantize_by_kernel(rows), quantize_reference(rows)
    assert torch.equal(ours[1], theirs[1])
    assert torch.equal(ours[0].float(), theirs[0].float())
