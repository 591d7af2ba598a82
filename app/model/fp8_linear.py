"""The frozen base in fp8 (e4m3): its weights rounded once, as it is loaded, and its products computed in fp8 as well.

Each weight is held twice, with a scale for every row: [out, in] for forward and [in, out] for what goes back to the
rows, since an fp8 product wants what it sums over side by side. Together they take what bf16 takes. Rows are rounded
as they come, with a scale for each. Where there is no fp8 hardware the same numbers are multiplied in float32.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from app.errors import EnvironmentProblem
from app.model.comparison import Comparison, first_line, max_difference
from app.model.kernels import can_run

Rounded = tuple[Tensor, Tensor]  # rows [n, k] in e4m3, and the scale of each [n, 1]

E4M3 = torch.float8_e4m3fn
_LARGEST = 448.0  # of e4m3
_LEAST = 1e-12  # of the largest number of a row: one of zeros has a scale too
_SIDE = 16  # that sizes must be a multiple of
_CAPABILITY = (8, 9)  # of the first GPUs with fp8: Ada; then Hopper

_ROWS = 32  # that a comparison computes with
# Of a product against the same numbers multiplied in float32: bf16 rounds to 0.002, and Hopper's fast sums keep 14
# bits. What fp8 itself rounds away is 0.037.
_ALLOWED = 0.02
_EXACT = 1e-5
_SAME = 1e-3  # of rows rounded twice: where a scale differs in its last bit a few numbers go the other way


KERNEL = {"used": True}  # whether it rounds rows where it can run; the comparison of a run takes that away

# operations of torch, so that a plan can count them
_OPS = torch.library.Library("app_fp8", "DEF")
_OPS.define("quantize_rows(Tensor rows) -> (Tensor, Tensor)")
_OPS.define("product(Tensor x, Tensor sx, Tensor w, Tensor sw, ScalarType dtype, bool fast) -> Tensor")


def quantize_reference(rows: Tensor) -> Rounded:
    """What a number in e4m3 means is that number times the scale of its row."""
    wide = rows.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    largest = torch.linalg.vector_norm(wide, torch.inf, -1, keepdim=True).clamp_(min=_LEAST)
    # a number divided by a tensor, and a tensor by a number on a GPU, would be rounded twice: kernels do not
    wide.mul_(torch.full_like(largest, _LARGEST).div_(largest)).clamp_(-_LARGEST, _LARGEST)
    return wide.to(E4M3), largest.mul_(1 / _LARGEST)


def quantize_by_kernel(rows: Tensor) -> Rounded:
    """The same in one launch, where a program can hold a row."""
    from app.model import triton_kernels

    if rows.shape[1] > triton_kernels.MAX_WIDTH:
        return quantize_reference(rows)
    out, scales = _quantized_like(rows)
    triton_kernels.quantize_rows(rows, out, scales, _LEAST, _LARGEST)
    return out, scales


def _quantize_on_gpu(rows: Tensor) -> Rounded:
    by_kernel = KERNEL["used"] and can_run(rows.device)
    return quantize_by_kernel(rows) if by_kernel else quantize_reference(rows)


def _quantized_like(rows: Tensor) -> Rounded:
    return torch.empty_like(rows, dtype=E4M3), rows.new_empty((rows.shape[0], 1), dtype=torch.float32)


def product_reference(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, dtype: torch.dtype, _: bool) -> Tensor:
    """x [n, k] times w [m, k] transposed, with scales [n, 1] and [1, m]; sums are as exact as float32 is."""
    return (x.float() @ w.float().T).mul_(sx).mul_(sw).to(dtype)


def _product_on_gpu(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    return torch._scaled_mm(x, w.t(), sx, sw, out_dtype=torch.bfloat16, use_fast_accum=fast).to(dtype)


_OPS.impl("quantize_rows", quantize_reference, "CPU")
_OPS.impl("quantize_rows", _quantize_on_gpu, "CUDA")
_OPS.impl("product", product_reference, "CPU")
_OPS.impl("product", _product_on_gpu, "CUDA")
torch.library.register_fake("app_fp8::quantize_rows", _quantized_like, lib=_OPS)
torch.library.register_fake(
    "app_fp8::product", lambda x, _sx, w, _sw, dtype, _: x.new_empty((len(x), len(w)), dtype=dtype), lib=_OPS
)


def quantize_rows(rows: Tensor) -> Rounded:
    """As above, by what the device has for it."""
    found: Rounded = torch.ops.app_fp8.quantize_rows(rows.contiguous())
    return found


def product(rows: Rounded, weight: Tensor, scales: Tensor, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """As above; `fast` sums are those of a forward pass, a gradient has exact ones."""
    found: Tensor = torch.ops.app_fp8.product(*rows, weight.view(E4M3), scales, dtype, fast)
    return found


class _LastRows:
    """Rows that several layers read are rounded once: q, k and v have the same, and gate and up.

    The last ones are kept as long as they live, and known again by their storage, place and version, so that a view
    made anew is the same and one that was written to since is not.
    """

    found: Rounded | None = None
    _storage: ReferenceType[Any] | None = None
    _key: tuple[Any, ...] = ()

    def rounded(self, rows: Tensor) -> Rounded:
        """Only rows of a forward pass: what goes back is made by kernels that may write in place."""
        if rows.is_inference() or torch.compiler.is_compiling():
            return quantize_rows(rows)
        key = (rows.storage_offset(), rows.shape, rows.stride(), rows.dtype, rows._version)
        same = self._storage is not None and self._storage() is rows.untyped_storage()
        if self.found is None or not same or self._key != key:
            self._storage = self.found = None  # before the next ones are made: so that there is room
            self.found, self._key = quantize_rows(rows), key
            self._storage = ref(rows.untyped_storage(), self._gone)
        return self.found

    def _gone(self, storage: ReferenceType[Any]) -> None:
        if storage is self._storage:
            self._storage = self.found = None


LAST_ROWS = _LastRows()


class Fp8Linear(nn.Linear):
    """A frozen linear layer. Weights are held as bytes, so that whoever casts a network's numbers leaves them alone."""

    weight_back: nn.Parameter
    scale: Tensor
    scale_back: Tensor
    rounds_rows = True

    def __init__(self, weight: Tensor, bias: nn.Parameter | None) -> None:
        """From [out, in]."""
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        for name, given in (("", weight), ("_back", weight.T)):
            bytes_, scales = quantize_reference(given)  # the kernel is not compared yet
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
            out = product(LAST_ROWS.rounded(rows), self.weight, self.scale, rows.dtype, fast=True)
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
def without_row_rounding(network: nn.Module) -> Iterator[None]:
    """For comparisons of something else: rounding rows makes much of the last digit of what is rounded."""
    layers = [layer for layer in network.modules() if isinstance(layer, Fp8Linear)]
    try:
        for layer in layers:
            layer.rounds_rows = False
        yield
    finally:
        for layer in layers:
            del layer.rounds_rows


def compare_products(
    network: nn.Module, present: Callable[[nn.Module], Any] = nullcontext
) -> list[Comparison]:
    """Each size of layer on this device against float32; a difference is refused. A kernel that rounds rows otherwise
    than torch, or does not start, is not used, and its proof says so. In `present` a module has its weights.
    """
    layers = {tuple(each.weight.shape): each for each in network.modules() if isinstance(each, Fp8Linear)}
    kernels = list(_kernel_compared(layers.values()))
    proofs = [proof for layer in layers.values() for proof in _products_compared(layer, present)]
    wrong = [proof for proof in proofs if not proof.passed]
    if wrong:
        raise EnvironmentProblem(
            f"quantization.kind=fp8: {wrong[0].what} differs by {wrong[0].difference:.1e} (allowed "
            f"{wrong[0].allowed:.1e}) on this device. Set quantization=none."
        )
    return [*kernels, *proofs]


@torch.no_grad()
def _kernel_compared(layers: Iterable[Fp8Linear]) -> Iterator[Comparison]:
    widths = {(part.shape[1], part.device) for each in layers for part in (each.weight, each.weight_back)}
    for width, device in sorted(widths, key=str):
        if not (KERNEL["used"] and can_run(device)):
            continue
        rows, why = _rows(width, device, torch.bfloat16), ""
        try:
            ours, theirs = (
                out.float() * scales for out, scales in (quantize_by_kernel(rows), quantize_reference(rows))
            )
            found = max_difference([ours], [theirs])
        except Exception as fault:  # noqa: BLE001 (whatever a compiler says: torch's own way is there)
            found, why = math.nan, f" ({first_line(fault)})"
        what = f"fp8 rows of {width} rounded by a kernel, against torch's own way{why}"
        proof = Comparison(what, found, _SAME)
        KERNEL["used"] = proof.passed
        yield proof


def _rows(width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Not at random: a run's random numbers must not depend on what was compared; each row of another size."""
    places = torch.arange(_ROWS * width, device=device, dtype=torch.float32).view(_ROWS, width)
    return (torch.sin(places) * (1 + places[:, :1] / width)).to(dtype)


@torch.no_grad()
def _products_compared(layer: Fp8Linear, present: Callable[[nn.Module], Any]) -> list[Comparison]:
    with present(layer):
        return [
            _compared("product", layer.weight, layer.scale, fast=True),
            _compared("product with the transposed", layer.weight_back, layer.scale_back, fast=False),
        ]


def _compared(words: str, weight: Tensor, scales: Tensor, *, fast: bool) -> Comparison:
    outputs, inputs = weight.shape
    dtype, allowed = (torch.bfloat16, _ALLOWED) if weight.is_cuda else (torch.float32, _EXACT)
    rows = _rows(inputs, weight.device, dtype)
    expected = product_reference(*quantize_reference(rows), weight.view(E4M3), scales, torch.float32, fast)
    try:
        found = product(quantize_rows(rows), weight, scales, dtype, fast=fast)
    except RuntimeError as fault:
        raise EnvironmentProblem(
            f"quantization.kind=fp8: torch {torch.__version__} cannot multiply {(outputs, inputs)} in fp8 on "
            f"this device ({' '.join(str(fault).split())[:200]}). Set quantization=none."
        ) from fault
    return Comparison(
        f"fp8 {words} weight, {inputs} to {outputs}, against float32",
        max_difference([found], [expected]),
        allowed,
    )
