"""Seconds per step of forward, backward, optimizer and waiting for data.

A mark ends one phase and begins the next. On a GPU it is a CUDA event in the queue: recording it does not wait, and
events are read once the device has passed them. The GPU waits for data only if it is idle while the host prepares the
next micro-batches, so a loader that keeps up takes no time.
"""

import time
from collections import deque
from itertools import pairwise

import torch

from app.tracking.formatting import PHASES

DATA, FORWARD = "data", "forward"
_END = "end"  # of a step
_KEYS = {
    FORWARD: "forward_seconds",
    "backward": "backward_seconds",
    "update": "optimizer_seconds",
    DATA: "data_seconds",
}
_WARMUP_STEPS = 2  # of a start; not in the means of the run

_Time = float | torch.cuda.Event
_Marks = list[tuple[str, _Time]]


class _Mean:
    """Mean seconds of each phase per step."""

    def __init__(self) -> None:
        self._steps = 0
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def add(self, marks: _Marks) -> None:
        self._steps += 1
        for (phase, start), (_, end) in pairwise(marks):
            self._seconds[_KEYS[phase]] += _between(start, end)

    def per_step(self) -> dict[str, float]:
        """Return the means; empty without steps."""
        return {key: seconds / self._steps for key, seconds in self._seconds.items()} if self._steps else {}


class PhaseTimes:
    """Times the phases of the steps of a start. A phase may be entered several times per step."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: _Marks = []  # of the current step
        self._unread: deque[tuple[int, _Marks]] = deque()  # finished steps that the device may not have passed
        self._steps = 0
        self._line, self._run = _Mean(), _Mean()

    def enter(self, phase: str) -> None:
        """Begin a phase: `data`, or one that the stepper reports."""
        self._marks.append((phase, self._now()))

    def end_step(self, *, counts: bool) -> None:
        """End the last phase of a step. A step that does not count (profiled, repeated) is left out of all means."""
        self.enter(_END)
        self._steps += 1
        if counts:
            self._unread.append((self._steps, self._marks))
        self._marks = []
        while self._unread and _is_over(self._unread[0][1][-1][1]):  # bounds the number of events
            self._read()

    def since_last_line(self) -> dict[str, float]:
        """Return the means since the last call, which waits for the device; empty without a step that counts."""
        while self._unread:
            last = self._unread[0][1][-1][1]
            if isinstance(last, torch.cuda.Event):
                last.synchronize()
            self._read()
        line, self._line = self._line, _Mean()
        return line.per_step()

    def of_run(self) -> dict[str, float]:
        """Return the means of this start after its warmup, up to the last line; empty if it has no such step."""
        return self._run.per_step()

    def _read(self) -> None:
        step, marks = self._unread.popleft()
        self._line.add(marks)
        if step > _WARMUP_STEPS:
            self._run.add(marks)

    def _now(self) -> _Time:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _is_over(mark: _Time) -> bool:
    return not isinstance(mark, torch.cuda.Event) or bool(mark.query())


def _between(start: _Time, end: _Time) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(start.elapsed_time(end)) / 1e3
    assert isinstance(start, float)
    assert isinstance(end, float)
    return end - start
