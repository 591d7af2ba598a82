"""Run as a program, without the interpreter: compiles kernels for a GPU that need not be there, tells their stores."""

import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from app.batch import IGNORE
from app.layers import triton_kernels

HOPPER = GPUTarget("cuda", 90, 32)


def stores(kernel: Any, given: dict[str, str], constants: dict[str, Any], **options: Any) -> str:
    names = kernel.arg_names
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in given}
    source = ASTSource(
        fn=kernel,
        signature={name: given.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    assembly = triton.compile(source, target=HOPPER, options=options).asm
    assert assembly["cubin"]
    return " ".join(sorted(set(re.findall(r"st\.global[.\w]*|fma\.rn\.f32", assembly["ptx"]))))


LOSS = {"logits": "*bf16", "targets": "*i64", "weights": "*fp32", "losses": "*fp32"}
SIZES = {"stride": "i32", "vocabulary": "i32", "width": "i32"}
for gradient in (True, False):
    known = {"WEIGHTED": gradient, "GRADIENT": gradient, "IGNORED": IGNORE, "BLOCK": 8192}
    sys.stdout.write(f"loss: {stores(triton_kernels.loss_and_grad_kernel, LOSS | SIZES, known, num_warps=16)}\n")
given = {"rows": "*bf16", "out": "*fp8e4nv", "scales": "*fp32", "width": "i32"}
rounding: dict[str, Any] = {"LEAST": 1e-12, "LARGEST": 448.0, "BLOCK": 4096}
sys.stdout.write(f"fp8: {stores(triton_kernels.quantize_rows_kernel, given, rounding, num_warps=8)}\n")
