"""Head and loss, forward and backward: all logits at once, in chunks of several sizes, and by the linear way."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from app.model.head import chunk_rows, token_loss_sum
from app.model.kernels import can_run
from app.model.kernels.loss import spend
from app.model.linear_head import LinearHead, rows_of_a_chunk
from scripts.bench.timing import NOT_HERE, Lines, Scale, milliseconds, rate

ROWS = 6528  # labelled ones of a bin of 16,384 tokens
MODELS = {"8b": (128256, 4096), "1b": (128256, 2048)}
CHUNKS = (512, 1024, 2048, 4096)


# `way` of a line: the model's own head, and our linear one with plain torch or with the kernel
OWN, PLAIN, KERNEL = "own", "linear, plain", "linear, kernel"


def head(scale: Scale, lines: Lines) -> None:
    """With a frozen head, then with a trained one; then the pass over the logits alone."""
    for name, (words, width) in MODELS.items():
        shape = scale.size(ROWS), scale.size(words), scale.size(width)
        count, vocabulary, hidden = shape
        smaller = {max(8, chunk // scale.divisor) for chunk in CHUNKS}
        suits = {OWN: chunk_rows(vocabulary), PLAIN: rows_of_a_chunk(count, vocabulary, scale.dtype.itemsize)}
        for trained in (False, True):
            known = {"trained": trained, "rows": count, "vocabulary": vocabulary, "hidden": hidden}
            for way in (OWN, PLAIN, KERNEL):
                usual = suits[OWN if way == OWN else PLAIN]
                for chunk in (*([None] if way == OWN else []), *sorted({usual, *smaller})):
                    measure = partial(_measure, scale, shape, way, chunk, trained=trained)
                    lines.attempt(name, measure, way=way, chunk=chunk, usual=chunk == usual, **known)
        for way in (PLAIN, KERNEL):
            measure = partial(_spending, scale, (min(count, max(smaller)), vocabulary), way)
            lines.attempt(f"{name} logits", measure, way=way, vocabulary=vocabulary)


def _measure(
    scale: Scale, shape: tuple[int, int, int], way: str, chunk: int | None, *, trained: bool
) -> dict[str, Any]:
    count, vocabulary, hidden = shape
    if way == KERNEL and not can_run(scale.device):
        return {"milliseconds": None, "why": NOT_HERE}
    rows = scale.random(count, hidden).requires_grad_()
    weight = scale.random(vocabulary, hidden, std=0.02).requires_grad_(trained)
    targets = torch.randint(vocabulary, (count,), device=scale.device)
    call = (
        _both_ways(rows, weight, targets, chunk)
        if way == OWN
        else _linear(rows, weight, targets, chunk, kernel=way == KERNEL)
    )
    if scale.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(scale.device)
    before = torch.cuda.memory_allocated(scale.device) if scale.device.type == "cuda" else 0
    took = milliseconds(call, scale.device)
    peak = torch.cuda.max_memory_allocated(scale.device) - before if scale.device.type == "cuda" else None
    work = (6.0 if trained else 4.0) * count * vocabulary * hidden
    return {"milliseconds": took, "tflops": rate(work, took), "peak_memory_bytes": peak}


def _linear(
    rows: Tensor, weight: Tensor, targets: Tensor, chunk: int | None, *, kernel: bool
) -> Callable[[], Any]:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
    linear = LinearHead(layer, kernel, chunk)
    wanted = [rows, *linear.trained]
    return lambda: torch.autograd.grad(linear.loss_sum(rows, targets), wanted)


def _spending(scale: Scale, shape: tuple[int, int], way: str) -> dict[str, Any]:
    """Its third call and those after it find gradients where logits were: numbers all the same."""
    if way == KERNEL and not can_run(scale.device):
        return {"milliseconds": None, "why": NOT_HERE}
    logits = scale.random(*shape)
    targets = torch.randint(shape[1], (shape[0],), device=scale.device)
    took = milliseconds(
        lambda: spend(logits, targets, None, gradient=True, kernel=way == KERNEL), scale.device
    )
    moved = 3 * logits.nbytes  # read twice, written once
    return {"milliseconds": took, "gb_per_second": moved / took / 1e6}


def _both_ways(rows: Tensor, weight: Tensor, targets: Tensor, chunk: int | None) -> Callable[[], Any]:
    wanted = [t for t in (rows, weight) if t.requires_grad]

    def at_once() -> Any:
        loss = F.cross_entropy(F.linear(rows, weight).float(), targets, reduction="sum")
        return torch.autograd.grad(loss, wanted)

    def in_chunks() -> Any:
        assert chunk is not None
        parameters = [torch.nn.Parameter(weight)] if weight.requires_grad else []
        used = parameters[0] if parameters else weight
        loss = token_loss_sum(lambda part: F.linear(part, used), rows, targets, parameters, chunk)
        return torch.autograd.grad(loss, [rows, *parameters])

    return at_once if chunk is None else in_chunks
