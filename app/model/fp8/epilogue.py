"""Rows rounded to e4m3 in the launch that makes them: SwiGLU and norms whose output fp8 layers multiply.

An operation gives the rows as well, for adapters, and whoever makes them here tells the layers what they are rounded
to. On a GPU without a proven kernel, and on a CPU, an operation is what it takes the place of, one after the other.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from app.model.fp8.layer import Fp8Linear, forget, know
from app.model.fp8.operations import E4M3, KERNELS, LARGEST, LEAST, quantize_rows
from app.model.kernels import can_run
from app.model.kernels.norms import WAYS, root_of

Rounded = tuple[Tensor, Tensor, Tensor]  # rows, their bytes, the scales of these
Normed = tuple[Tensor, Tensor, Tensor, Tensor]  # rows, their roots, bytes, scales

_OPERATIONS = torch.library.Library("app_fp8", "FRAGMENT")
_OPERATIONS.define("silu_mul_rounded(Tensor gate, Tensor up) -> (Tensor, Tensor, Tensor)")
_OPERATIONS.define(
    "norm_rounded(Tensor x, Tensor weight, float eps, int way) -> (Tensor, Tensor, Tensor, Tensor)"
)


@dataclass(frozen=True, slots=True)
class SwiGlu:
    """silu(gate) * up, of rows [n, k]."""

    name = "SwiGLU"

    def plain(self, gate: Tensor, up: Tensor) -> Rounded:
        """One after the other; rounded by what the device has for it."""
        opened = F.silu(gate).mul_(up)
        return opened, *quantize_rows(opened)

    def by_kernel(self, gate: Tensor, up: Tensor) -> Rounded:
        """The same in one launch, where a program can hold a row."""
        from app.model.kernels import fp8_triton

        if gate.shape[-1] > fp8_triton.WIDEST:
            return self.plain(gate, up)
        opened, out, scales = _room_for(gate)
        fp8_triton.silu_mul_quantize(gate, up, opened, out, scales, LEAST, LARGEST)
        return opened, out, scales


@dataclass(frozen=True, slots=True)
class RootMeanSquare:
    """The norm of rows in any leading shape; `way` is a place in WAYS."""

    eps: float
    way: int
    name = "norm"

    def plain(self, x: Tensor, weight: Tensor) -> Normed:
        """One after the other; rounded by what the device has for it."""
        root = root_of(x, self.eps)
        normed = WAYS[self.way].weighted(x * root, weight, x.dtype)
        return normed, root, *quantize_rows(normed.flatten(0, -2))

    def by_kernel(self, x: Tensor, weight: Tensor) -> Normed:
        """The same in one launch, where a program can hold a row."""
        from app.model.kernels import fp8_triton

        if x.shape[-1] > fp8_triton.WIDEST:
            return self.plain(x, weight)
        normed, out, scales = _room_for(x)
        roots = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        fp8_triton.norm_quantize(x, weight, self.eps, self.way, normed, roots, out, scales, LEAST, LARGEST)
        return normed, roots, out, scales


Form = SwiGlu | RootMeanSquare


def _room_for(rows: Tensor) -> Rounded:
    count = rows.numel() // rows.shape[-1]
    out = rows.new_empty((count, rows.shape[-1]), dtype=E4M3)
    return torch.empty_like(rows), out, rows.new_empty((count, 1), dtype=torch.float32)


def _on_gpu(form: Any, one: Tensor, other: Tensor) -> Any:
    proven = KERNELS.used and form.name not in KERNELS.refused
    return form.by_kernel(one, other) if proven and can_run(one.device) else form.plain(one, other)


_OPERATIONS.impl("silu_mul_rounded", lambda gate, up: SwiGlu().plain(gate, up), "CPU")
_OPERATIONS.impl("silu_mul_rounded", lambda gate, up: _on_gpu(SwiGlu(), gate, up), "CUDA")
_OPERATIONS.impl("norm_rounded", lambda x, w, eps, way: RootMeanSquare(eps, way).plain(x, w), "CPU")
_OPERATIONS.impl("norm_rounded", lambda x, w, eps, way: _on_gpu(RootMeanSquare(eps, way), x, w), "CUDA")


@torch.library.register_fake("app_fp8::silu_mul_rounded")  # type: ignore[untyped-decorator]
def _opened_shapes(gate: Tensor, _up: Tensor) -> Rounded:
    return _room_for(gate)


@torch.library.register_fake("app_fp8::norm_rounded")  # type: ignore[untyped-decorator]
def _normed_shapes(x: Tensor, _weight: Tensor, _eps: float, _way: int) -> Normed:
    normed, out, scales = _room_for(x)
    return normed, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32), out, scales


def is_silu(act: Any) -> bool:
    """As torch or transformers have it."""
    return act is F.silu or isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation"


def read_rounded(readers: Iterable[Fp8Linear], like: Tensor) -> bool:
    """Whether rows that are made now, of the dtype and device of `like`, will be known again when these read them."""
    if torch.is_inference_mode_enabled() or torch.compiler.is_compiling():
        return False
    kind = like.device.type
    cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != like.dtype
    return not cast and any(layer.rounds_rows for layer in readers)


def opened_and_rounded(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of rows [n, k]; layers that are given it know what it is rounded to."""
    forget()
    opened, *rounded = torch.ops.app_fp8.silu_mul_rounded(gate.contiguous(), up.contiguous())
    know(opened, tuple(rounded))
    result: Tensor = opened
    return result


def normed_and_rounded(form: RootMeanSquare, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of rows in any leading shape, and what each row was multiplied by; known to layers likewise."""
    forget()
    normed, root, *rounded = torch.ops.app_fp8.norm_rounded(x.contiguous(), weight, form.eps, form.way)
    know(normed.flatten(0, -2), tuple(rounded))
    return normed, root
