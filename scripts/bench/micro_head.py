"""Head and loss, forward and backward: all logits at once, and in chunks of several sizes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from app.model.head import chunk_rows, token_loss_sum
from scripts.bench.timing import Lines, Scale, milliseconds, rate

ROWS = 6528  # labelled ones of a bin of 16,384 tokens
MODELS = {"8b": (128256, 4096), "1b": (128256, 2048)}
CHUNKS = (512, 1024, 2048, 4096)


def head(scale: Scale, lines: Lines) -> None:
    """With a frozen head, then with a trained one."""
    for name, sizes in MODELS.items():
        vocabulary, hidden = (scale.size(number) for number in sizes)
        count = scale.size(ROWS)
        usual = chunk_rows(vocabulary)
        for trained in (False, True):
            known = {"trained": trained, "rows": count, "vocabulary": vocabulary, "hidden": hidden}
            for chunk in (None, *sorted({usual, *(max(8, c // scale.divisor) for c in CHUNKS)})):
                measure = partial(_measure, scale, (count, vocabulary, hidden), chunk, trained=trained)
                lines.attempt(name, measure, chunk=chunk, usual=chunk == usual, **known)


def _measure(
    scale: Scale, shape: tuple[int, int, int], chunk: int | None, *, trained: bool
) -> dict[str, Any]:
    count, vocabulary, hidden = shape
    rows = scale.random(count, hidden).requires_grad_()
    weight = scale.random(vocabulary, hidden, std=0.02).requires_grad_(trained)
    targets = torch.randint(vocabulary, (count,), device=scale.device)
    call = _both_ways(rows, weight, targets, chunk)
    if scale.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(scale.device)
    before = torch.cuda.memory_allocated(scale.device) if scale.device.type == "cuda" else 0
    took = milliseconds(call, scale.device)
    peak = torch.cuda.max_memory_allocated(scale.device) - before if scale.device.type == "cuda" else None
    work = (6.0 if trained else 4.0) * count * vocabulary * hidden
    return {"milliseconds": took, "tflops": rate(work, took), "peak_memory_bytes": peak}


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
