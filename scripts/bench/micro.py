"""Speed of single operations on this machine, at the shapes of Llama models.

python -m scripts.bench.micro ITEM --device cuda --out FILE.jsonl

Writes a JSON line per measurement, with `error` if it is not possible here. `--tiny` uses small shapes.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from app.batch import PackedSequences
from app.errors import AppError
from app.layers.attention import BACKENDS
from app.layers.attention.requirements import Rules
from app.layers.attention.sdpa import sdpa
from app.layers.frozen_linear import quantize_rows
from app.layers.head import LinearHead
from scripts.bench.machine import here

# Errors of kernels that this machine does not support; the next one is tried.
FAULTS = (RuntimeError, ValueError, TypeError, AttributeError, ImportError, AssertionError, KeyError, AppError)
REPEAT_SECONDS = {"cuda": 0.4, "cpu": 0.02}
MAX_REPEATS, WARM_UP_CALLS = 50, 3

TOKENS = 16384
LAYERS = {  # outputs x inputs
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
PACKED_LAYERS = ("8b gate", "8b q", "70b gate")
WIDTHS = {"8b hidden": 4096, "8b inner": 14336, "70b hidden": 8192, "70b inner": 28672}

LABELED_ROWS = 6528  # in a bin of 16,384 tokens
HEADS_OF_MODELS = {"8b": (128256, 4096), "1b": (128256, 2048)}

CHECKED_TOKENS = 512
QUERY_HEADS, KEY_HEADS, HEAD_SIZE = 32, 8, 128  # of Llama 8B
RULES = Rules(causal=True, scale=None, dropout=0.0, window=None, softcap=None, sinks=None)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Scale:
    """Device and sizes; `divisor` shrinks every size."""

    device: torch.device
    divisor: int

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype of a run."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def size(self, number: int) -> int:
        """Return a scaled size, a multiple of 64, which NF4 requires."""
        return max(64, number // self.divisor // 64 * 64)

    def random(self, *shape: int, std: float = 1.0) -> Tensor:
        """Return random values of realistic size; zeros are faster, because they need less power."""
        return torch.randn(shape, device=self.device, dtype=self.dtype) * std


class Lines:
    """JSON lines, appended to a file immediately."""

    def __init__(self, file: Path, item: str, device: torch.device) -> None:
        self._file = file
        self._common = {"stage": "micro", "item": item, **here(device)}

    def attempt(self, name: str, measure: Callable[[], dict[str, Any]], **facts: Any) -> None:
        """Write the line of a measurement, or its error."""
        try:
            values = measure()
        except FAULTS as fault:
            values = {"error": f"{type(fault).__name__}: {fault}".splitlines()[0][:300]}
        rounded = {key: _rounded(value) for key, value in values.items()}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, **facts, **rounded, **self._common}) + "\n")


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the median time of repeated calls, after warmup calls."""
    for _ in range(WARM_UP_CALLS):
        call()
    once = _seconds(call, device)
    repeats = max(3, min(MAX_REPEATS, int(REPEAT_SECONDS[device.type] / max(once, 1e-6))))
    return 1e3 * median(_seconds(call, device) for _ in range(repeats))


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    call()
    after.record()
    torch.cuda.synchronize(device)
    return float(before.elapsed_time(after)) / 1e3


def tera_per_second(operations: float, milliseconds: float) -> float:
    """Return the rate in 1e12 operations per second."""
    return operations / milliseconds / 1e9


def gemm(scale: Scale, lines: Lines) -> None:
    """Measure matrix products in the precision of a run, and in fp8 with a scale per row."""
    for numbers, ready in (("run", _in_run_dtype), ("fp8", _in_fp8), ("fp8 slow sums", _in_fp8_exactly)):
        for name, (n, k) in LAYERS.items():
            shape = scale.size(TOKENS), scale.size(n), scale.size(k)
            lines.attempt(name, partial(_product, scale, ready, shape), numbers=numbers, shape=shape)


Shape = tuple[int, int, int]  # tokens, outputs, inputs


def _product(scale: Scale, ready: Callable[[Scale, Shape], Callable[[], Tensor]], shape: Shape) -> dict[str, Any]:
    took = milliseconds(ready(scale, shape), scale.device)
    tokens, n, k = shape
    return {"milliseconds": took, "tflops": tera_per_second(2.0 * tokens * n * k, took)}


def _in_run_dtype(scale: Scale, shape: Shape) -> Callable[[], Tensor]:
    tokens, n, k = shape
    return partial(F.linear, scale.random(tokens, k), scale.random(n, k, std=0.02))


def _in_fp8(scale: Scale, shape: Shape, *, fast: bool = True) -> Callable[[], Tensor]:
    tokens, n, k = shape
    x, x_scale = rows_in_fp8(scale.random(tokens, k))
    w, w_scale = rows_in_fp8(scale.random(n, k, std=0.02))
    return partial(torch._scaled_mm, x, w.t(), x_scale, w_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=fast)


def _in_fp8_exactly(scale: Scale, shape: Shape) -> Callable[[], Tensor]:
    return _in_fp8(scale, shape, fast=False)


def rows_in_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 values and a scale per row, whose product approximates x."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    row = x.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / largest
    return (x.float() / row).to(torch.float8_e4m3fn), row


def nf4(scale: Scale, lines: Lines) -> None:
    """Measure dequantization by bitsandbytes into one buffer, and the forward product with and without it."""
    for name in PACKED_LAYERS:
        n, k = (scale.size(number) for number in LAYERS[name])
        for double in (True, False):
            unpack = partial(_unpacking, scale, n, k, double=double)
            lines.attempt(name, unpack, way="unpack", double_quant=double, shape=(n, k))
        for unpacked in (True, False):
            way = "product alone" if unpacked else "unpack and product"
            product = partial(_packed_product, scale, n, k, unpacked=unpacked)
            lines.attempt(name, product, way=way, shape=(scale.size(TOKENS), n, k))


def _unpack(scale: Scale, n: int, k: int, *, double: bool) -> Callable[[], Tensor]:
    """Dequantize into one buffer on a GPU, as a run does; bitsandbytes has no such operation on a CPU."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(scale.random(n, k, std=0.02), quant_type="nf4", compress_statistics=double)
    buffer = scale.random(n, k) if scale.device.type == "cuda" else None
    return lambda: dequantize_4bit(packed, state, out=buffer)


def _unpacking(scale: Scale, n: int, k: int, *, double: bool) -> dict[str, Any]:
    took = milliseconds(_unpack(scale, n, k, double=double), scale.device)
    bytes_per_scale = 1 / 64 if double else 4 / 64  # of each weight
    moved = n * k * (0.5 + bytes_per_scale + scale.dtype.itemsize)
    return {"milliseconds": took, "gb_per_second": moved / took / 1e6}


def _packed_product(scale: Scale, n: int, k: int, *, unpacked: bool) -> dict[str, Any]:
    x = scale.random(scale.size(TOKENS), k)
    unpack = _unpack(scale, n, k, double=True)
    weight = unpack()
    call = partial(F.linear, x, weight) if unpacked else lambda: F.linear(x, unpack())
    took = milliseconds(call, scale.device)
    return {"milliseconds": took, "tflops": tera_per_second(2.0 * len(x) * n * k, took)}


def head(scale: Scale, lines: Lines) -> None:
    """Measure head and loss, forward and backward: all logits at once, and in our chunks."""
    for name, sizes in HEADS_OF_MODELS.items():
        rows, vocabulary, hidden = (scale.size(number) for number in (LABELED_ROWS, *sizes))
        for trained in (False, True):
            for way in ("at once", "chunks"):
                measure = partial(_head_and_loss, scale, (rows, vocabulary, hidden), way, trained=trained)
                lines.attempt(name, measure, way=way, trained=trained, shape=(rows, vocabulary, hidden))


def _head_and_loss(scale: Scale, shape: Shape, way: str, *, trained: bool) -> dict[str, Any]:
    count, vocabulary, hidden = shape
    rows = scale.random(count, hidden).requires_grad_()
    layer = torch.nn.Linear(hidden, vocabulary, bias=False, device="meta")
    layer.weight = torch.nn.Parameter(scale.random(vocabulary, hidden, std=0.02), requires_grad=trained)
    targets = torch.randint(vocabulary, (count,), device=scale.device)
    inputs = [rows, *([layer.weight] if trained else [])]

    def call() -> Any:
        if way == "at once":
            loss = F.cross_entropy(layer(rows).float(), targets, reduction="sum")
        else:
            loss = LinearHead(layer).loss_sum(rows, targets)
        return torch.autograd.grad(loss, inputs)

    on_gpu = scale.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(scale.device)
    before = torch.cuda.memory_allocated(scale.device) if on_gpu else 0
    took = milliseconds(call, scale.device)
    peak = torch.cuda.max_memory_allocated(scale.device) - before if on_gpu else None
    work = (6.0 if trained else 4.0) * count * vocabulary * hidden
    return {"milliseconds": took, "tflops": tera_per_second(work, took), "peak_memory_bytes": peak}


def rounding(scale: Scale, lines: Lines) -> None:
    """Measure the quantization of activation rows to fp8."""
    for name, width in WIDTHS.items():
        shape = scale.size(TOKENS), scale.size(width)
        lines.attempt(name, partial(_rounded_rows, scale, shape), shape=shape)


def _rounded_rows(scale: Scale, shape: tuple[int, int]) -> dict[str, Any]:
    rows = scale.random(*shape)
    took = milliseconds(lambda: quantize_rows(rows), scale.device)
    return {"milliseconds": took, "gb_per_second": (rows.nbytes + rows.numel()) / took / 1e6}


def attention(scale: Scale, lines: Lines) -> None:
    """Measure all backends on a packed row: documents of up to 2,048 tokens, then one as long as the row."""
    tokens = scale.size(TOKENS)
    for name, lengths in {"many": lengths_in(tokens), "one": (tokens,)}.items():
        documents = PackedSequences.from_lengths(lengths).to(scale.device)
        for backend in (*BACKENDS, "mask"):
            facts = {"documents": name, "tokens": tokens, "heads": (QUERY_HEADS, KEY_HEADS, HEAD_SIZE)}
            lines.attempt(backend, partial(_attention, scale, backend, documents), **facts)


def lengths_in(tokens: int) -> tuple[int, ...]:
    """Return lengths of chats that fill a row; the last one is truncated."""
    random, longest = np.random.default_rng(0), max(8, tokens // 8)
    drawn, left = [], tokens
    while left:
        length = int(np.clip(random.lognormal(np.log(longest / 4), 0.8), 8, longest))
        drawn.append(min(length, left))
        left -= drawn[-1]
    return tuple(drawn)


def _attention(scale: Scale, backend: str, documents: PackedSequences) -> dict[str, Any]:
    attend = _attend(scale, backend, documents)
    q, k, v = _inputs(scale, int(documents.cu_seqlens[-1]))
    forward = milliseconds(lambda: attend(q, k, v), scale.device)
    out = attend(q, k, v)
    upstream = torch.randn_like(out)
    backward = milliseconds(lambda: torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True), scale.device)
    pairs = sum(n * n for n in documents.lengths) / 2  # with causal attention
    work = 4.0 * pairs * QUERY_HEADS * HEAD_SIZE
    return {
        "forward_milliseconds": forward,
        "backward_milliseconds": backward,
        "forward_tflops": tera_per_second(work, forward),
        "backward_tflops": tera_per_second(2.5 * work, backward),
        **_differences(scale, backend),
    }


def _attend(scale: Scale, backend: str, documents: PackedSequences) -> Attend:
    """Return the attention function of a backend; RuntimeError if this machine does not support it."""
    if backend == "mask":
        return partial(_with_mask, mask=_mask(documents, scale.device))
    missing = BACKENDS[backend].requires(scale.device)
    if missing:
        raise RuntimeError(f"needs {' and '.join(missing)}")
    run = BACKENDS[backend].run
    return lambda q, k, v: run(q, k, v, RULES, documents)


def _mask(documents: PackedSequences, device: torch.device) -> Tensor:
    """Return the full square mask of a packed row, as transformers builds it."""
    lengths = torch.tensor(documents.lengths, device=device)
    document = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    position = torch.arange(len(document), device=device)
    same, causal = document[:, None] == document[None], position[:, None] >= position[None]
    return (same & causal)[None, None]


def _with_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def _inputs(scale: Scale, tokens: int) -> list[Tensor]:
    heads = (QUERY_HEADS, KEY_HEADS, KEY_HEADS)
    return [scale.random(1, count, tokens, HEAD_SIZE).requires_grad_() for count in heads]


def _differences(scale: Scale, backend: str) -> dict[str, float]:
    """Return the largest relative differences of output and gradients from float64, document by document."""
    documents = PackedSequences.from_lengths(lengths_in(scale.size(CHECKED_TOKENS))).to(scale.device)
    inputs = _inputs(scale, int(documents.cu_seqlens[-1]))
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    out = _attend(scale, backend, documents)(*inputs)
    reference = sdpa(exact[0], exact[1], exact[2], RULES, documents)
    upstream = torch.randn_like(reference)
    gradients = torch.autograd.grad(out, inputs, upstream.to(out.dtype))
    expected = torch.autograd.grad(reference, exact, upstream)
    return {
        "difference": _largest_difference(out, reference),
        "gradient_difference": max(map(_largest_difference, gradients, expected)),
    }


def _largest_difference(result: Tensor, reference: Tensor) -> float:
    return float((result.detach().double() - reference).abs().max() / reference.abs().max())


ITEMS: dict[str, Callable[[Scale, Lines], None]] = {
    "gemm": gemm,
    "attention": attention,
    "nf4": nf4,
    "head": head,
    "rounding": rounding,
}


def main() -> None:
    """Measure one item."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("item", choices=ITEMS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a dry run")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    ITEMS[options.item](Scale(device, 64 if options.tiny else 1), Lines(options.out, options.item, device))


if __name__ == "__main__":
    main()
