"""The kernels that round rows, in Triton's interpreter, against plain torch.

The interpreter has casts of its own (bf16 is cut off, e4m3 forgets to carry). So the arithmetic is compared before its
last step, with rows rounded to float32, to the last bit; and then e4m3 itself, as far as the interpreter knows it."""

from typing import Any

import pytest
import torch

from app.model.fp8.epilogue import RootMeanSquare, SwiGlu
from app.model.fp8.operations import quantize_by_kernel, quantize_reference
from app.model.kernels.norms import WAYS
from tests.model.test_fp8_kernels import rows_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [SwiGlu(), *(RootMeanSquare(1e-5, way) for way in range(len(WAYS)))])
def test_a_gpu_gives_what_two_launches_give(form: Any, dtype: torch.dtype) -> None:
    """By the operations that layers call, so that a kernel that is not chosen is noticed."""
    for width in (48, 4096, 14336, 53248):
        x = rows_of(width, torch.float32).clamp(-30, 30).view(2, 3, width).to(dtype).cuda()
        other = x[-1, -1].cos() if isinstance(form, RootMeanSquare) else x.flatten(0, 1).flip(1)
        one = x if isinstance(form, RootMeanSquare) else x.flatten(0, 1)
        found, plain = form.by_kernel(one, other), form.plain(one, other)
        for ours, theirs in zip(
            found[:-2], plain[:-2], strict=True
        ):  # rows, and what a norm multiplied them by
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            assert float((ours.double() - theirs.double()).norm() / theirs.double().norm()) < 1e-3
        again, known = quantize_reference(found[0].view(6, width))
        assert torch.equal(found[-2].float(), again.float())
        assert torch.equal(found[-1], known)
        through = (
            torch.ops.app_fp8.silu_mul_rounded(one, other)
            if isinstance(form, SwiGlu)
            else torch.ops.app_fp8.norm_rounded(one, other, form.eps, form.way)
        )
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(through, found, strict=True))


@pytest.mark.parametrize("width", [16, 4096, 14336, 53248])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_rounds_as_torch_does(width: int, dtype: torch.dtype) -> None:
    rows = rows_of(width, dtype).cuda()
    ours, theirs = quantize_by_kernel(rows), quantize_reference(rows)
    assert torch.equal(ours[1], theirs[1])
    assert torch.equal(ours[0].float(), theirs[0].float())
