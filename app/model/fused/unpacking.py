"""One room for the weights of four bits that products unpack, on GPUs where our kernel gives bitsandbytes' bits."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from app.model.kernels import taken_by
from app.model.kernels.nf4 import Packed, Scratch
from app.model.proof import Proof, reason

Present = Callable[[nn.Module], Any]  # a context in which a module's weights are there


@dataclass(frozen=True, slots=True)
class Unpacking:
    """What was proven of the kernel, and what is told where it is not used."""

    proofs: tuple[Proof, ...] = ()
    remarks: tuple[str, ...] = ()


def share_scratch(
    network: nn.Module, dtype: torch.dtype, present: Present = nullcontext, *, proven: bool = True
) -> Unpacking:
    """Give all packed layers one, before they are fused; `dtype` is computed in. They look for it in `scratch`."""
    layers: list[Any] = [layer for layer in network.modules() if type(layer).__name__ == "Linear4bit"]
    weights: list[Any] = [layer.weight for layer in layers]
    if not layers or not taken_by(weights[0].device):
        return Unpacking()
    found = _proven(layers, dtype, present) if proven else Unpacking()
    if not found.remarks:
        scratch = Scratch(weights)
        for layer in layers:
            layer.scratch = scratch
    return found


def _proven(layers: list[Any], dtype: torch.dtype, present: Present) -> Unpacking:
    """A kernel that cannot be made here is no reason to stop."""
    try:
        kinds = {_kind(layer.weight): layer for layer in layers}
        proofs = tuple(_proof(layer, dtype, present) for layer in kinds.values())
    except Exception as fault:  # noqa: BLE001  whatever compilers and drivers raise
        return _left_alone(reason(fault))
    wrong = [proof for proof in proofs if not proof.holds]
    if wrong:
        return _left_alone(f"{wrong[0].what}: {wrong[0].difference:.1e} of the weights differ")
    return Unpacking(proofs)


def _left_alone(why: str) -> Unpacking:
    return Unpacking(remarks=(f"weights of 4 bits are unpacked by bitsandbytes, not by our kernel: {why}",))


def _kind(weight: Any) -> tuple[Any, ...]:
    state = weight.quant_state
    return (*state.shape, state.nested, state.blocksize, state.quant_type)


def _proof(layer: Any, dtype: torch.dtype, present: Present) -> Proof:
    """Every bit counts."""
    from bitsandbytes.functional import dequantize_4bit

    weight = layer.weight
    state = copy(weight.quant_state)
    state.dtype = dtype
    with present(layer):
        wanted = dequantize_4bit(weight.data, state)
        found = torch.empty_like(wanted)
        Packed.of(weight).into(found)
    outputs, inputs = state.shape
    what = f"{state.quant_type} weights, {inputs} to {outputs}, unpacked by our kernel against bitsandbytes"
    return Proof(what, float((found != wanted).float().mean()), 0.0)
