"""The time of each step, without making a GPU wait between steps."""

import time
from itertools import pairwise

import torch
from torch import Tensor


class Clock:
    """`begin`, then `mark` after each step; the first step and the warm-up are told apart from the others.

    On a GPU the marks are events in its queue, read once at the end. The device is waited for twice before that: after
    the first step, which may compile, and at the end of the warm-up, where peak memory begins anew.
    """

    def __init__(self, device: torch.device, warm_up: int) -> None:
        self.device = device
        self.warm_up = warm_up
        self.first_step = 0.0
        self.cpu_seconds = 0.0
        self.peak_before = (0, 0)
        self._losses: list[Tensor | float] = []
        self._marks: list[float | torch.cuda.Event] = []
        self._begun = 0.0

    @property
    def on_gpu(self) -> bool:
        """Whether steps are queued rather than done when their call returns."""
        return self.device.type == "cuda"

    def begin(self) -> None:
        """Just before the first step."""
        self._wait()
        self._begun = time.perf_counter()
        if self.warm_up == 0:
            self._start_measuring()

    def mark(self, loss: Tensor | float) -> None:
        """A step is over, with this token mean."""
        self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
        done = len(self._losses)
        if done == 1:
            self._wait()
            self.first_step = time.perf_counter() - self._begun
        if done == self.warm_up:
            self._start_measuring()
        elif done > self.warm_up:
            self._mark()

    def end(self) -> None:
        """After the last step."""
        self._wait()
        self.cpu_seconds = time.process_time() - self.cpu_seconds

    @property
    def losses(self) -> list[float]:
        """Of every step, those of the warm-up too."""
        return [float(loss) for loss in self._losses]

    @property
    def step_seconds(self) -> list[float]:
        """Of each measured step."""
        return [_between(a, b) for a, b in pairwise(self._marks)]

    def _start_measuring(self) -> None:
        self._wait()
        if self.on_gpu:
            self.peak_before = (
                torch.cuda.max_memory_allocated(self.device),
                torch.cuda.max_memory_reserved(self.device),
            )
            torch.cuda.reset_peak_memory_stats(self.device)
        self.cpu_seconds = time.process_time()
        self._mark()

    def _mark(self) -> None:
        if not self.on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def _between(a: "float | torch.cuda.Event", b: "float | torch.cuda.Event") -> float:
    if isinstance(a, torch.cuda.Event) and isinstance(b, torch.cuda.Event):
        return float(a.elapsed_time(b)) / 1e3
    assert isinstance(a, float)
    assert isinstance(b, float)
    return b - a
