"""How long a call takes, and lines about it."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from app.errors import AppError
from scripts.bench.machine import here

# What a kernel that this machine cannot do may raise; the next one is tried.
FAULTS = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    ImportError,
    AssertionError,
    KeyError,
    AppError,
)
NOT_HERE = "our kernels need Triton and an NVIDIA GPU"
_SECONDS = {"cuda": 0.4, "cpu": 0.02}  # of repetitions
_MOST, _WARM_UP = 50, 3


@dataclass(frozen=True, slots=True)
class Scale:
    """Where and how large. `divisor` shrinks every size."""

    device: torch.device
    divisor: int

    @property
    def dtype(self) -> torch.dtype:
        """What a run computes in."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def size(self, number: int) -> int:
        """A multiple of 64 still, as NF4 wants it."""
        return max(64, number // self.divisor // 64 * 64)

    def random(self, *shape: int, std: float = 1.0) -> Tensor:
        """As large as real ones are: zeros compute faster, because they need less power."""
        return torch.randn(shape, device=self.device, dtype=self.dtype) * std


def milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """The median of repeated calls, after some for warming up."""
    for _ in range(_WARM_UP):
        call()
    once = _timed(call, device)
    repeats = max(3, min(_MOST, int(_SECONDS[device.type] / max(once, 1e-6))))
    return 1e3 * median(_timed(call, device) for _ in range(repeats))


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    call()
    after.record()
    torch.cuda.synchronize(device)
    return float(before.elapsed_time(after)) / 1e3


def rate(operations: float, milliseconds: float) -> float:
    """In 1e12 operations a second."""
    return operations / milliseconds / 1e9


class Lines:
    """Appended to a file, each at once."""

    def __init__(self, file: Path, item: str, device: torch.device) -> None:
        self._file = file
        self._common = {"stage": "micro", "item": item, **here(device)}

    def write(self, **found: Any) -> None:
        """One line."""
        self._append({key: _rounded(value) for key, value in found.items()})

    def attempt(self, name: str, measure: Callable[[], dict[str, Any]], **known: Any) -> None:
        """The line of one measurement; where it fails, a line that says why."""
        try:
            found = measure()
        except FAULTS as fault:
            found = {"error": f"{type(fault).__name__}: {fault}".splitlines()[0][:300]}
        self.write(name=name, **known, **found)

    def _append(self, line: dict[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, **self._common}) + "\n")


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
