"""The kernels that round rows, in Triton's interpreter, against plain torch.

The interpreter has casts of its own (bf16 is cut off, e4m3 forgets to carry). So the arithmetic is compared before its
last step, with rows rounded to float32, to the last bit; and then e4m3 itself, as far as the interpreter knows it.
"""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from app.model.fp8.operations import E4M3, quantize_reference
from app.model.kernels.norms import WAYS, root_of
from tests.conftest import REPO

pytest.importorskip("triton", reason="part of the dev extra")

# by themselves, because Triton reads TRITON_INTERPRET when a kernel is defined
PROGRAM = """
import sys
import torch
from app.model.kernels import fp8_triton
given = torch.load(sys.argv[1])
found = {}
for name, (rows, kind) in given["rows"].items():
    out, scales = torch.empty_like(rows, dtype=kind), torch.empty(len(rows), 1)
    fp8_triton.quantize_rows(rows, out, scales, 1e-12, 448.0)
    found[name] = (out.float(), scales)
gate, up = given["gated"]
opened, out, scales = torch.empty_like(gate), torch.empty_like(gate, dtype=torch.float32), torch.empty(len(gate), 1)
fp8_triton.silu_mul_quantize(gate, up, opened, out, scales, 1e-12, 448.0)
found["gated"] = (opened, out, scales)
x, gain = given["normed"]
for way in range(3):
    normed, out, roots, scales = torch.empty_like(x), torch.empty_like(x), torch.empty(2, 3, 1), torch.empty(6, 1)
    fp8_triton.norm_quantize(x, gain, 1e-5, way, normed, roots, out, scales, 1e-12, 448.0)
    found[f"normed {way}"] = (normed, roots, out, scales)
torch.save(found, sys.argv[2])
"""


def rows_of(width: int, dtype: torch.dtype) -> Tensor:
    """Of many sizes, with a row of zeros."""
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(6, width, generator=generator) * torch.logspace(-4, 4, 6)[:, None]
    rows[2] = 0
    return rows.to(dtype)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("kernels")
    odd = rows_of(48, torch.float32)
    odd[1, 3], odd[4, 5] = float("nan"), float("inf")
    given = {
        "rows": {
            "fp32": (rows_of(96, torch.float32), torch.float32),
            "bf16": (rows_of(160, torch.bfloat16), torch.float32),
            "e4m3": (rows_of(96, torch.float32), E4M3),
            "not finite": (odd, torch.float32),
        },
        "normed": (rows_of(72, torch.float32).view(2, 3, 72), rows_of(72, torch.float32)[4] / 100),
        "gated": (rows_of(80, torch.float32).clamp(-30, 30), rows_of(80, torch.float32).flip(1)),
    }
    torch.save(given, folder / "given.pt")
    program = [sys.executable, "-c", PROGRAM, str(folder / "given.pt"), str(folder / "found.pt")]
    environment = {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
    }
    ended = subprocess.run(program, cwd=REPO, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return {"given": given, **torch.load(folder / "found.pt")}


def scaled(rows: Tensor) -> tuple[Tensor, Tensor]:
    """What is rounded, and the scales: quantize_reference without its last step."""
    wide = rows.float()
    largest = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return (wide * (torch.full_like(largest, 448.0) / largest)).clamp(-448, 448), largest * (1 / 448)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_rows_are_scaled_to_the_last_bit(name: str, found: dict[str, Any]) -> None:
    out, scales = found[name]
    rows, _ = found["given"]["rows"][name]
    expected, known = scaled(rows)
    assert torch.equal(out, expected)
    assert torch.equal(scales, known)
    assert torch.equal(expected.to(E4M3).float(), quantize_reference(rows)[0].float()), (
        "the same as the reference"
    )
    assert torch.equal(known, quantize_reference(rows)[1])


def test_e4m3_is_the_nearest_one(found: dict[str, Any]) -> None:
    """But where rounding up reaches the next power of two: the interpreter forgets to carry."""
    out, scales = found["e4m3"]
    rows, _ = found["given"]["rows"]["e4m3"]
    expected, known = scaled(rows)
    nearest = expected.to(E4M3).float()
    carried = (nearest.abs() > expected.abs()) & (torch.frexp(nearest).mantissa.abs() == 0.5)
    assert torch.equal(scales, known)
    assert torch.equal(out[~carried], nearest[~carried])
    assert 0 < int(carried.sum()) < 0.1 * carried.numel()


def test_what_is_not_finite_is_not_lost(found: dict[str, Any]) -> None:
    out, scales = found["not finite"]
    lost = (out * scales).isfinite().all(1).tolist()
    assert lost == [True, False, True, True, False, True]


def test_the_activation_is_multiplied_and_rounded_in_one_launch(found: dict[str, Any]) -> None:
    opened, out, scales = found["gated"]
    gate, up = (each.double() for each in found["given"]["gated"])
    expected = torch.nn.functional.silu(gate) * up
    assert float((opened.double() - expected).norm() / expected.norm()) < 1e-6
    again, known = scaled(opened)
    assert torch.equal(out, again)
    assert torch.equal(scales, known)


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_a_norm_is_rounded_in_one_launch(way: int, found: dict[str, Any]) -> None:
    normed, roots, out, scales = found[f"normed {way}"]
    x, gain = found["given"]["normed"]
    more = 1.0 if way == 2 else 0.0
    expected = torch.nn.functional.rms_norm(x.double(), x.shape[-1:], gain.double() + more, 1e-5)
    assert float((normed.double() - expected).norm() / expected.norm()) < 1e-6
    torch.testing.assert_close(roots, root_of(x, 1e-5), rtol=1e-6, atol=0)
    assert torch.equal(normed, WAYS[way].weighted(x * roots, gain, x.dtype)), "so it can be made again"
    again, known = scaled(normed.view(6, 72))
    assert torch.equal(out.view(6, 72), again)
    assert torch.equal(scales, known)
