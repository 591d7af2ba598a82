"""The proof of fp8 products on the device of a run: each size of layer against float32."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from app.errors import EnvironmentProblem
from app.model.fp8.epilogue import Form, SwiGlu
from app.model.fp8.layer import Fp8Linear
from app.model.fp8.operations import (
    E4M3,
    KERNELS,
    product,
    product_reference,
    quantize_by_kernel,
    quantize_reference,
    quantize_rows,
)
from app.model.kernels import can_run
from app.model.proof import Proof, furthest, reason

_ROWS = 32  # that a proof computes with
_SPREAD = 4.0  # of what is opened: so far that a gate is shut
# Of a product against the same numbers multiplied in float32: bf16 rounds to 0.002, and Hopper's fast sums keep 14
# bits. What fp8 itself rounds away is 0.037.
_ALLOWED = 0.02
_EXACT = 1e-5
_SAME = 1e-3  # of rows rounded twice: where a scale differs in its last bit a few numbers go the other way


def prove(network: nn.Module, present: Callable[[nn.Module], Any] = nullcontext) -> list[Proof]:
    """Each size of layer on this device against the same numbers multiplied in float32; a difference is refused. In
    `present` a module has its weights.

    A kernel that rounds rows otherwise than torch, or does not start, is not used; that proof says so.
    """
    every = [module for module in network.modules() if isinstance(module, Fp8Linear)]
    layers = {tuple(layer.weight.shape): layer for layer in every}
    kernels = [*_kernels_proven(layers.values()), *_epilogues_proven(every, _dtype_of(network))]
    proofs = [proof for layer in layers.values() for proof in _proofs(layer, present)]
    wrong = [proof for proof in proofs if not proof.holds]
    if wrong:
        raise EnvironmentProblem(
            f"quantization.kind=fp8: {wrong[0].what} differs by {wrong[0].difference:.1e} (allowed "
            f"{wrong[0].allowed:.1e}) on this device. Set quantization=none."
        )
    return [*kernels, *proofs]


@torch.no_grad()
def _kernels_proven(layers: Iterable[Fp8Linear]) -> Iterator[Proof]:
    widths = {(part.shape[1], part.device) for each in layers for part in (each.weight, each.weight_back)}
    for width, device in sorted(widths, key=str):
        if KERNELS.used and can_run(device):
            rows = _rows(width, device, torch.bfloat16)
            proof = _of_kernel(f"fp8 rows of {width} rounded", partial(_rounding_apart, rows))
            KERNELS.used = proof.holds
            yield proof


@torch.no_grad()
def _epilogues_proven(layers: Iterable[Fp8Linear], dtype: torch.dtype) -> Iterator[Proof]:
    """Each way to make rows and round them at once, at the widths where layers are given them so."""
    asked = {(each.given_by, each.weight.shape[1], each.weight.device) for each in layers if each.given_by}
    for form, width, device in sorted(asked, key=str):
        if KERNELS.used and form.name not in KERNELS.refused and can_run(device):
            rows = _rows(width, device, dtype)
            other = rows.flip(1) if isinstance(form, SwiGlu) else rows[-1].cos()
            what = f"fp8 {form.name} of {width} made and rounded"
            proof = _of_kernel(what, partial(_making_apart, form, rows.mul_(_SPREAD), other))
            KERNELS.refused |= set() if proof.holds else {form.name}
            yield proof


def _dtype_of(network: nn.Module) -> torch.dtype:
    """Of what is not packed, and so of the rows."""
    frozen = (each.dtype for each in network.parameters() if not each.requires_grad)
    return next((dtype for dtype in frozen if dtype.is_floating_point), torch.bfloat16)


def _of_kernel(what: str, apart: Callable[[], float]) -> Proof:
    """One that does not start is not a number apart, and the proof says why."""
    why = ""
    try:
        found = apart()
    except Exception as fault:  # noqa: BLE001 (whatever a compiler says: torch's own way is there)
        found, why = math.nan, f" ({reason(fault)})"
    return Proof(f"{what} by a kernel, against torch's own way{why}", found, _SAME)


def _rounding_apart(rows: Tensor) -> float:
    return furthest([_meant(*quantize_by_kernel(rows))], [_meant(*quantize_reference(rows))])


def _making_apart(form: Form, rows: Tensor, other: Tensor) -> float:
    """What is rounded is compared with what was made: a last digit there may go the other way and be none here."""
    made, *roots, out, scales = form.by_kernel(rows, other)
    expected, *expected_roots, _, _ = form.plain(rows, other)
    again = quantize_reference(made)
    return furthest([made, *roots, _meant(out, scales)], [expected, *expected_roots, _meant(*again)])


def _meant(rows: Tensor, scales: Tensor) -> Tensor:
    return rows.float() * scales


def _rows(width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Not at random: a run's random numbers must not depend on what was proven; each row of another size."""
    places = torch.arange(_ROWS * width, device=device, dtype=torch.float32).view(_ROWS, width)
    return (torch.sin(places) * (1 + places[:, :1] / width)).to(dtype)


def _proofs(layer: Fp8Linear, present: Callable[[nn.Module], Any]) -> list[Proof]:
    with present(layer):
        return list(_of_layer(layer))


@torch.no_grad()
def _of_layer(layer: Fp8Linear) -> Iterator[Proof]:
    device = layer.weight.device
    dtype, allowed = (torch.bfloat16, _ALLOWED) if device.type == "cuda" else (torch.float32, _EXACT)
    for words, weight, scales, fast in (
        ("product", layer.weight, layer.scale, True),
        ("product with the transposed", layer.weight_back, layer.scale_back, False),
    ):
        inputs = weight.shape[1]
        rows = _rows(inputs, device, dtype)
        expected = product_reference(
            *quantize_reference(rows), weight.view(E4M3), scales, torch.float32, fast
        )
        try:
            found = product(quantize_rows(rows), weight, scales, dtype, fast=fast).float()
        except RuntimeError as fault:
            raise EnvironmentProblem(
                f"quantization.kind=fp8: torch {torch.__version__} cannot multiply {tuple(weight.shape)} in fp8 on "
                f"this device ({' '.join(str(fault).split())[:200]}). Set quantization=none."
            ) from fault
        apart = float((found - expected).norm() / expected.norm())
        size = f"{inputs} to {weight.shape[0]}"
        yield Proof(f"fp8 {words} weight, {size}, against float32", apart, allowed)
