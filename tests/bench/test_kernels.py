"""Operations of a profiled step: classes, shapes."""

from dataclasses import replace

import pytest
import torch

from scripts.bench.kernels import class_of, kernels_of
from tests.bench.test_workload import CONTEST

RANK, VOCABULARY = 16, 1536


@pytest.mark.parametrize(
    ("name", "shapes", "expected"),
    [
        ("aten::mm", [[16384, 4096], [4096, 14336]], "base products"),
        ("aten::mm", [[16384, 4096], [4096, 48]], "thin products"),
        ("aten::addmm_", [[16384, 4096], [16384, 16], [16, 4096], []], "thin products"),
        ("aten::mm", [[512, 4096], [4096, VOCABULARY]], "head products"),
        ("bitsandbytes::gemm_4bit", [[16384, 4096], [29360128, 1], [2]], "base products"),
        ("bitsandbytes::dequantize_4bit", [[29360128, 1]], "quantize"),
        ("torch_attn::_varlen_attn", [[16384, 32, 128]], "attention"),
        ("aten::_flash_attention_backward", [[16384, 32, 128]], "attention"),
        ("triton_poi_fused_addmm_varlen_attn_mul_4", [[16384, 4096]], "element-wise"),
        ("triton_red_fused_mm_mean_3", [[16384, 4096]], "normalisations"),
        ("triton_tem_fused_mm_0", [[16384, 4096], [4096, 16]], "thin products"),
        ("aten::copy_", [[16, 4096], [16, 4096]], "copies"),
    ],
)
def test_class_of_operation(name: str, shapes: list[list[int]], expected: str) -> None:
    assert class_of(name, shapes, RANK, VOCABULARY) == expected


def test_kernels_of_profile_tells_products_apart() -> None:
    x, base, thin, head = (torch.randn(shape) for shape in ((8, 24), (24, 40), (24, RANK), (24, VOCABULARY)))
    with torch.profiler.profile(record_shapes=True) as profiler:
        for weight in (base, base, thin, head):
            x @ weight
        torch._foreach_add([x, x], 1.0)
    kernels = kernels_of(profiler, replace(CONTEST, rank=RANK), VOCABULARY)
    products = {
        row["shapes"]: (row["class"], row["calls"]) for row in kernels["operations"] if row["name"] == "aten::mm"
    }
    assert products == {
        "8x24 24x40": ("base products", 2),
        f"8x24 24x{RANK}": ("thin products", 1),
        f"8x24 24x{VOCABULARY}": ("head products", 1),
    }
    seconds = [row["seconds"] for row in kernels["operations"]]
    assert seconds == sorted(seconds, reverse=True)
    assert sum(kernels["classes"].values()) == pytest.approx(sum(seconds), abs=1e-5)
    assert kernels["kernels"] == [], "there are no kernels on a CPU"
