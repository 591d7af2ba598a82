"""Remaining time of a start: steps, evaluations and saves."""

import time
from collections import deque

MAX_WINDOW_SECONDS = 300.0  # limits the time of wrong estimates after a change of speed


class Eta:
    """Estimate of the remaining time; each evaluation and save counts as long as the last one of its kind.

    Speed is measured over the newer half of this start, at most the last minutes, to exclude a slow start or a
    temporarily busy machine. `every`: steps between pauses of a kind; 0: only at the end.
    """

    def __init__(self, end: int, every: dict[str, int]) -> None:
        self._end = end  # the last step of this start
        self._every = every
        self._last = dict.fromkeys(every, 0.0)  # seconds of the last pause by kind
        self._paused = 0.0
        self._marks: deque[tuple[int, float]] = deque()  # steps, each with the training seconds until its end
        self._began: float | None = None

    def add_pause(self, kind: str, seconds: float) -> None:
        self._last[kind] = seconds
        self._paused += seconds

    def seconds_left(self, step: int) -> float | None:
        """Return the estimate after `step`, before its evaluation and save; None at the first call and at the end."""
        now = time.perf_counter() - self._paused
        self._began = now if self._began is None else self._began
        self._marks.append((step, now))
        since = now - min((now - self._began) / 2, MAX_WINDOW_SECONDS)
        while len(self._marks) > 2 and self._marks[1][1] <= since:
            self._marks.popleft()
        before, then = self._marks[0]
        if step <= before or step >= self._end:
            return None
        pauses = sum(self._last[kind] * self._number_from(step, every) for kind, every in self._every.items())
        return (self._end - step) * (now - then) / (step - before) + pauses

    def _number_from(self, step: int, every: int) -> int:
        """Count the multiples of `every` from `step` to the end, and the end itself."""
        if not every:
            return 1
        return self._end // every - (step - 1) // every + (self._end % every > 0)
