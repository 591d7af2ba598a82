"""Matrix products: bf16, fp8, with adapters, and from weights of four bits."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from app.model.fused.frozen import Dense, FourBits, Frozen
from app.model.kernels import can_run
from app.model.kernels.nf4 import Packed, Scratch
from scripts.bench.timing import NOT_HERE, Lines, Scale, milliseconds, rate

TOKENS, RANK = 16384, 16
# outputs x inputs
LAYERS = {
    "8b gate": (14336, 4096),
    "8b down": (4096, 14336),
    "8b q": (4096, 4096),
    "8b k": (1024, 4096),
    "8b q|k|v": (6144, 4096),
    "8b gate|up": (28672, 4096),
    "8b head": (128256, 4096),
    "1b gate": (8192, 2048),
    "70b gate": (28672, 8192),
}
_ADAPTED = ("8b gate", "8b down", "8b q", "1b gate")


def gemm(scale: Scale, lines: Lines) -> None:
    """In the precision of a run, then in fp8 with a scale for each row."""
    for dtype, ready in (("run", _in_run_dtype), ("fp8", _in_fp8), ("fp8 slow sums", _in_fp8_exactly)):
        for name, (n, k) in LAYERS.items():
            shape = scale.size(TOKENS), scale.size(n), scale.size(k)
            lines.attempt(name, partial(_product, scale, ready, shape), numbers=dtype, shape=shape)


Shape = tuple[int, int, int]  # tokens, outputs, inputs


def _product(
    scale: Scale, ready: Callable[[Scale, Shape], Callable[[], Tensor]], shape: Shape
) -> dict[str, Any]:
    took = milliseconds(ready(scale, shape), scale.device)
    tokens, n, k = shape
    return {"milliseconds": took, "tflops": rate(2.0 * tokens * n * k, took)}


def _in_run_dtype(scale: Scale, shape: Shape) -> Callable[[], Tensor]:
    tokens, n, k = shape
    return partial(F.linear, scale.random(tokens, k), scale.random(n, k, std=0.02))


def _in_fp8(scale: Scale, shape: Shape, *, fast: bool = True) -> Callable[[], Tensor]:
    tokens, n, k = shape
    x, x_scale = rows_in_fp8(scale.random(tokens, k))
    w, w_scale = rows_in_fp8(scale.random(n, k, std=0.02))
    return partial(
        torch._scaled_mm, x, w.t(), x_scale, w_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def _in_fp8_exactly(scale: Scale, shape: Shape) -> Callable[[], Tensor]:
    return _in_fp8(scale, shape, fast=False)


def rows_in_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 and the scale of each row, so that x is about the product of both."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    row = x.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / largest
    return (x.float() / row).to(torch.float8_e4m3fn), row


@dataclass(frozen=True, slots=True)
class Adapted:
    """A frozen layer with its adapter, an input and the gradient of its output."""

    w: Tensor  # [N, K]
    a: Tensor  # [r, K]
    b: Tensor  # [N, r]
    x: Tensor  # [T, K]
    dy: Tensor  # [T, N]
    factor: float = 2.0

    def base_alone(self) -> tuple[Tensor, ...]:
        """Output and input gradient without an adapter."""
        return self.x @ self.w.T, self.dy @ self.w

    def apart(self) -> tuple[Tensor, ...]:
        """Output and the gradients of x, A and B, with products for the adapter alone, added in place."""
        h = self.x @ self.a.T
        y = (self.x @ self.w.T).addmm_(h, self.b.T, alpha=self.factor)
        dh = self.dy @ self.b * self.factor
        dx = (self.dy @ self.w).addmm_(dh, self.a)
        return y, dx, dh.T @ self.x, self.dy.T @ h * self.factor

    def joined(self) -> Callable[[], tuple[Tensor, ...]]:
        """The same by one product forward and one backward, [X | XA'] [W | sB]'; joining weights costs once a step."""
        k = self.w.shape[1]
        weights = torch.cat([self.w, self.factor * self.b], dim=1)
        wide = torch.cat([self.x, self.x.new_empty(len(self.x), len(self.a))], dim=1)

        def run() -> tuple[Tensor, ...]:
            torch.mm(self.x, self.a.T, out=wide[:, k:])
            y = wide @ weights.T
            both = self.dy @ weights
            dh = both[:, k:]
            dx = both[:, :k].addmm_(dh, self.a)
            return y, dx, dh.T @ self.x, self.dy.T @ wide[:, k:] * self.factor

        return run


def adapter(scale: Scale, lines: Lines) -> None:
    """What an adapter costs beside its layer, forward and backward; one product against several."""
    for name in _ADAPTED:
        n, k = (scale.size(number) for number in LAYERS[name])
        tokens = scale.size(TOKENS)
        layer = adapted(scale, tokens, n, k)
        for way in ("base_alone", "apart", "joined"):
            measure = partial(_way, scale, layer, way)
            lines.attempt(name, measure, way=way, rank=RANK, shape=(tokens, n, k))


def adapted(scale: Scale, tokens: int, n: int, k: int) -> Adapted:
    """At random."""
    return Adapted(
        w=scale.random(n, k, std=0.02),
        a=scale.random(RANK, k, std=0.02),
        b=scale.random(n, RANK, std=0.02),
        x=scale.random(tokens, k),
        dy=scale.random(tokens, n),
    )


def _way(scale: Scale, layer: Adapted, way: str) -> dict[str, Any]:
    call = layer.joined() if way == "joined" else getattr(layer, way)
    return {"milliseconds": milliseconds(call, scale.device)}


UNPACKING = ("bitsandbytes", "plain", "kernel")  # who does it
PRODUCTS = ("unpacked before", "bitsandbytes", "kernel")


def nf4(scale: Scale, lines: Lines) -> None:
    """Unpacking alone, in bytes read and written; and a product that unpacks first against one that need not."""
    for name in ("8b gate", "8b q", "70b gate"):
        n, k = (scale.size(number) for number in LAYERS[name])
        for double in (True, False):
            for by in UNPACKING:
                measure = partial(_unpacking, scale, n, k, by, double=double)
                lines.attempt(name, measure, way="unpack", by=by, double_quant=double, shape=(n, k))
        for by in PRODUCTS:
            measure = partial(_multiplying, scale, n, k, by)
            lines.attempt(name, measure, way="product", by=by, shape=(scale.size(TOKENS), n, k))


def _unpacking(scale: Scale, n: int, k: int, by: str, *, double: bool) -> dict[str, Any]:
    from bitsandbytes.functional import dequantize_4bit

    from app.model.kernels.nf4 import unpack_plain

    if by == "kernel" and not can_run(scale.device):
        return {"milliseconds": None, "why": NOT_HERE}
    weight = _packed_layer(scale, n, k, double=double).weight
    packed, out = Packed.of(weight), scale.random(n, k)
    ways: dict[str, Callable[[], Any]] = {
        "bitsandbytes": lambda: dequantize_4bit(weight.data, weight.quant_state),
        "plain": lambda: unpack_plain(packed, out),
        "kernel": lambda: packed.into(out),
    }
    took = milliseconds(ways[by], scale.device)
    scales = 1 / 64 if double else 4 / 64  # bytes of each weight
    moved = n * k * (0.5 + scales + out.element_size())
    return {"milliseconds": took, "gb_per_second": moved / took / 1e6}


def _multiplying(scale: Scale, n: int, k: int, by: str) -> dict[str, Any]:
    """Forward and the way back to the rows, as a fused layer makes them."""
    if by == "kernel" and not can_run(scale.device):
        return {"milliseconds": None, "why": NOT_HERE}
    x, above = scale.random(scale.size(TOKENS), k), scale.random(scale.size(TOKENS), n)
    frozen: Frozen
    if by == "unpacked before":
        layer = torch.nn.Linear(k, n, bias=False, device=scale.device, dtype=scale.dtype)
        frozen = Dense(layer)
    else:
        packed = _packed_layer(scale, n, k, double=True)
        packed.scratch = Scratch([packed.weight]) if by == "kernel" else None
        frozen = FourBits(packed)
    with torch.no_grad():
        took = milliseconds(lambda: (frozen.product(x), frozen.back(above)), scale.device)
    return {"milliseconds": took, "tflops": rate(4.0 * len(x) * n * k, took)}


def _packed_layer(scale: Scale, n: int, k: int, *, double: bool) -> Any:
    from app.model.quantize import FourBit

    layer = torch.nn.Linear(k, n, bias=False, device=scale.device, dtype=scale.dtype)
    layer.weight.data.copy_(scale.random(n, k, std=0.02))
    holder = torch.nn.Sequential(layer)
    FourBit("nf4", double_quant=double, compute=scale.dtype).pack(holder)
    return holder[0]
