"""The frozen base in fp8 (e4m3): its weights rounded once, as it is loaded, and its products computed in fp8 as well.

Each weight is held twice, with a scale for every row: [out, in] for forward and [in, out] for what goes back to the
rows, since an fp8 product wants what it sums over side by side. Together they take what bf16 takes. Rows are rounded
as they come, with a scale for each. Where there is no fp8 hardware the same numbers are multiplied in float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from app.model.fp8.operations import E4M3, product, quantize_reference, quantize_rows


class _Shared:
    """Rows that several layers read are rounded once: q, k and v have the same, and gate and up.

    The last ones are kept as long as they live, and known again by their storage, place and version, so that a view
    made anew is the same and one that was written to since is not.
    """

    def __init__(self) -> None:
        self._storage: ReferenceType[Any] | None = None
        self._key: tuple[Any, ...] = ()
        self._found: tuple[Tensor, Tensor] | None = None

    def rounded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Only rows of a forward pass: what goes back is made by kernels that may write in place."""
        if rows.is_inference() or torch.compiler.is_compiling():
            return quantize_rows(rows)
        same = self._storage is not None and self._storage() is rows.untyped_storage()
        if self._found is None or not same or self._key != _key_of(rows):
            self.forget()
            self.know(rows, quantize_rows(rows))
            assert self._found is not None
        return self._found

    def know(self, rows: Tensor, rounded: tuple[Tensor, Tensor]) -> None:
        """What these rows are rounded to."""
        self._found, self._key = rounded, _key_of(rows)
        self._storage = ref(rows.untyped_storage(), self._gone)

    def forget(self) -> None:
        """Before the next ones are made: so that there is room."""
        self._storage = self._found = None

    def _gone(self, storage: ReferenceType[Any]) -> None:
        if storage is self._storage:
            self.forget()


def _key_of(rows: Tensor) -> tuple[Any, ...]:
    return rows.storage_offset(), rows.shape, rows.stride(), rows.dtype, rows._version


_SHARED = _Shared()
# for who makes rows [n, k] and rounds them in one go: layers that are given them need not
know, forget = _SHARED.know, _SHARED.forget


class Fp8Linear(nn.Linear):
    """A frozen linear layer. Weights are held as bytes, so that whoever casts a network's numbers leaves them alone."""

    weight_back: nn.Parameter
    scale: Tensor
    scale_back: Tensor
    rounds_rows = True
    given_by: Any = None  # a form of fp8.epilogue, where its rows come rounded

    def __init__(self, weight: Tensor, bias: nn.Parameter | None) -> None:
        """From [out, in]."""
        outputs, inputs = weight.shape
        super().__init__(inputs, outputs, bias=False, device="meta")
        for name, given in (("", weight), ("_back", weight.T)):
            bytes_, scales = quantize_reference(given)  # kernels are not proven yet
            held = nn.Parameter(bytes_.view(torch.uint8), requires_grad=False)
            setattr(self, f"weight{name}", held)
            self.register_buffer(f"scale{name}", scales.T.contiguous())
        self.register_parameter("bias", bias)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Rows in any leading shape; the gradient is that of the rows alone."""
        result: Tensor = _Linear.apply(x, self)  # type: ignore[no-untyped-call]
        return result

    def product(self, rows: Tensor) -> Tensor:
        """Of rows [n, in] in the dtype that is computed in."""
        if self.rounds_rows:
            out = product(_SHARED.rounded(rows), self.weight, self.scale, rows.dtype, fast=True)
        else:
            out = rows @ self.unpacked(rows.dtype).T
        return out if self.bias is None else out.add_(self.bias)

    def back(self, gradient: Tensor) -> Tensor:
        """From the gradient of the product that of its rows."""
        if not self.rounds_rows:
            return gradient @ self.unpacked(gradient.dtype)
        return product(quantize_rows(gradient), self.weight_back, self.scale_back, gradient.dtype, fast=False)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """[out, in], as forward has it."""
        return (self.weight.view(E4M3).float() * self.scale.T).to(dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Fp8Linear) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        ctx.layer, ctx.shape, ctx.dtype, ctx.computed = layer, x.shape, x.dtype, dtype
        with torch.autocast(kind, enabled=False):
            return layer.product(x.flatten(0, -2).to(dtype)).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        gradient = upstream[0].flatten(0, -2).to(ctx.computed)
        with torch.autocast(gradient.device.type, enabled=False):
            return ctx.layer.back(gradient).to(ctx.dtype).view(ctx.shape), None


@contextmanager
def rows_as_they_are(network: nn.Module) -> Iterator[None]:
    """For proofs of something else: rounding rows makes much of the last digit of what is rounded."""
    layers = [layer for layer in network.modules() if isinstance(layer, Fp8Linear)]
    try:
        for layer in layers:
            layer.rounds_rows = False
        yield
    finally:
        for layer in layers:
            del layer.rounds_rows
