"""Rows rounded to fp8: by themselves, and as SwiGLU and norms make them, in one launch and one after the other."""

from functools import partial
from typing import Any

from torch import Tensor

from app.model.fp8.epilogue import Form, RootMeanSquare, SwiGlu
from app.model.fp8.operations import quantize_rows
from app.model.kernels import can_run
from scripts.bench.timing import NOT_HERE, Lines, Scale, milliseconds

TOKENS = 16384
WIDTHS = {"8b hidden": 4096, "8b inner": 14336, "70b hidden": 8192, "70b inner": 28672}
APART, AT_ONCE = "apart", "kernel"  # `way` of a line


def rounding(scale: Scale, lines: Lines) -> None:
    """What a launch of its own costs, which the last two ways save."""
    for name, width in WIDTHS.items():
        shape = scale.size(TOKENS), scale.size(width)
        lines.attempt(name, partial(_alone, scale, shape), way="rounded alone", shape=shape)
        form: Form = SwiGlu() if name.endswith("inner") else RootMeanSquare(1e-5, 0)
        for way in (APART, AT_ONCE):
            lines.attempt(
                name, partial(_made, scale, shape, form, way), way=way, makes=form.name, shape=shape
            )


def _alone(scale: Scale, shape: tuple[int, int]) -> dict[str, Any]:
    rows = scale.random(*shape)
    return _told(milliseconds(lambda: quantize_rows(rows), scale.device), rows.nbytes + rows.numel())


def _made(scale: Scale, shape: tuple[int, int], form: Form, way: str) -> dict[str, Any]:
    if way == AT_ONCE and not can_run(scale.device):
        return {"milliseconds": None, "why": NOT_HERE}
    rows, up = scale.random(*shape), scale.random(*shape)
    other: Tensor = up if isinstance(form, SwiGlu) else up[0]
    call: Any = form.by_kernel if way == AT_ONCE else form.plain
    took = milliseconds(lambda: call(rows, other), scale.device)
    return _told(took, 2 * rows.nbytes + other.nbytes + rows.numel())


def _told(took: float, least: int) -> dict[str, Any]:
    """`least`: bytes that must be read and written once."""
    return {"milliseconds": took, "gb_per_second": least / took / 1e6}
