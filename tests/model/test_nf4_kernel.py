"""Weights of four bits unpacked by the kernel and by plain torch, to the last bit as bitsandbytes unpacks them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.config.schema import QuantizationConfig
from app.model.kernels import as_on_gpu, can_run
from app.model.kernels.nf4 import Packed, Scratch, unpack_plain
from app.model.quantize import FourBit
from app.model.trainee import Trainee
from tests.marks import requires_interpreter
from tests.model.small import distance, gradients, lora, trainee_of
from tests.model.test_recompute import BATCH

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NF4 = QuantizationConfig(kind="nf4", double_quant=True)
LLAMAS = ((1024, 4096), (14336, 4096), (4096, 14336))  # outputs, inputs


def packed_weight(outputs: int, inputs: int, dtype: torch.dtype, device: str, *, double: bool) -> Any:
    generator = torch.Generator().manual_seed(outputs)
    layer = nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(0.05 * torch.randn(outputs, inputs, generator=generator))
    holder = nn.Sequential(layer)
    FourBit("nf4", double_quant=double, compute=dtype).pack(holder)
    return holder[0].weight


def of_bitsandbytes(weight: Any) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    result: Tensor = dequantize_4bit(weight.data, weight.quant_state)
    return result


def odd(packed: Packed) -> tuple[Packed, int]:
    """The same weights without the last 33: a block that is not full, and half a byte."""
    count = 2 * packed.data.numel() - 33
    return replace(packed, data=packed.data[: (count + 1) // 2]), count


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain(dtype: torch.dtype, *, double: bool) -> None:
    weight = packed_weight(300, 192, dtype, "cpu", double=double)
    found = torch.empty(300, 192, dtype=dtype)
    unpack_plain(Packed.of(weight), found)
    assert torch.equal(found, of_bitsandbytes(weight))
    operation = torch.empty_like(found)
    Packed.of(weight).into(operation)
    assert torch.equal(operation, found)


@requires_interpreter
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel(dtype: torch.dtype, *, double: bool) -> None:
    """900 blocks are no multiple of what a program takes. The interpreter cuts bf16 off where a GPU rounds."""
    from app.model.kernels.nf4_triton import unpack

    weight = packed_weight(300, 192, dtype, "cpu", double=double)
    found = torch.empty(300, 192, dtype=dtype)
    unpack(Packed.of(weight), found)
    wanted = of_bitsandbytes(weight)
    if dtype == torch.bfloat16:
        exact = torch.empty(300, 192)
        unpack_plain(Packed.of(weight), exact)
        assert torch.equal(wanted, exact.bfloat16())
        wanted = (exact.view(torch.int32) & -65536).view(torch.float32).bfloat16()
    assert torch.equal(found, wanted)


@requires_interpreter
@pytest.mark.parametrize("double", [False, True])
def test_the_kernel_where_sizes_are_odd(*, double: bool) -> None:
    from app.model.kernels.nf4_triton import unpack

    weight = packed_weight(70, 64, torch.float32, "cpu", double=double)
    packed, count = odd(Packed.of(weight))
    room = torch.full((count + 8,), 7.0)
    unpack(packed, room[:count])
    plain = torch.empty(count)
    unpack_plain(packed, plain)
    assert torch.equal(room[:count], plain)
    assert torch.equal(plain, of_bitsandbytes(weight).flatten()[:count])
    assert bool((room[count:] == 7).all())


def test_one_room_for_all_weights() -> None:
    large, small = (packed_weight(n, 64, torch.float32, "cpu", double=True) for n in (48, 16))
    scratch = Scratch([small, large])
    first = scratch.unpacked(large, torch.float32)
    assert torch.equal(first, of_bitsandbytes(large))
    second = scratch.unpacked(small, torch.float32)
    assert second.data_ptr() == first.data_ptr()
    assert torch.equal(second, of_bitsandbytes(small))
    assert scratch.unpacked(small, torch.bfloat16).dtype == torch.bfloat16


def test_a_cpu_has_no_use_for_it() -> None:
    assert not can_run(torch.device("cpu"))
    trainee = trainee_of("llama", lora(), quantization=NF4)
    assert trainee.unpacking.proofs == ()
    assert not any(hasattr(layer, "scratch") for layer in trainee.network.modules())


def outcome(trainee: Trainee) -> tuple[float, dict[str, Tensor]]:
    loss = trainee(BATCH)[0]
    loss.backward()
    return float(loss.detach()), gradients(trainee)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_through_the_room_gives_the_same(kind: str, precision: str) -> None:
    """Every weight is written over before the backward pass. Qwen 2 has biases."""
    plain = trainee_of(kind, lora(), precision, quantization=NF4)
    with as_on_gpu():
        shared = trainee_of(kind, lora(), precision, quantization=NF4)
    assert any(hasattr(layer, "scratch") for layer in shared.network.modules())
    assert shared.unpacking.proofs
    assert shared.remarks() == []
    assert shared.fused == replace(plain.fused, proofs=shared.fused.proofs)
    (loss, found), (wanted_loss, wanted) = outcome(shared), outcome(plain)
    assert loss == pytest.approx(wanted_loss, rel=1e-6 if precision == "fp32" else 1e-3)
    assert distance(found, wanted) <= (1e-6 if precision == "fp32" else 1e-2)


@pytest.mark.parametrize("fault", ["raises", "differs"])
def test_a_kernel_that_fails_is_left_alone(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def into(packed: Packed, out: Tensor) -> None:
        if fault == "raises":
            raise RuntimeError("Failed to find C compiler.\nmore")
        unpack_plain(packed, out)
        out[0, 0] += 1

    monkeypatch.setattr(Packed, "into", into)
    with as_on_gpu():
        trainee = trainee_of("llama", lora(), quantization=NF4)
    assert trainee.unpacking.proofs == ()
    (remark,) = trainee.remarks()
    assert remark.startswith("weights of 4 bits are unpacked by bitsandbytes, not by our kernel: ")
    assert ("Failed to find C compiler." if fault == "raises" else "of the weights differ") in remark
    assert not any(hasattr(layer, "scratch") for layer in trainee.network.modules())
    assert outcome(trainee)[0] > 0
