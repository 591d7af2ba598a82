"""The time left in a start: its steps, and the evaluations and saves that are still to come."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_WINDOW_SECONDS = 300.0  # after a change of speed the time left is wrong no longer than this
FORWARD_SHARE = 1 / 3  # of a step: a backward pass costs about two forward passes


@dataclass(frozen=True, slots=True)
class Workload:
    """Steps, evaluations and saves of a start. An interval of 0 means: at the end only."""

    end: int  # the last step of this start
    eval_every: int = 0
    save_every: int = 0
    evaluates: bool = False
    evaluates_at_end: bool = True
    eval_size: float = 0.0  # tokens of an evaluation over those of a step

    def evaluations_from(self, step: int) -> int:
        """How many are still to come when `step` has just been trained."""
        return _times(step, self.end, self.eval_every, self.evaluates_at_end) if self.evaluates else 0

    def saves_from(self, step: int) -> int:
        """How many are still to come; one is always made at the end."""
        return _times(step, self.end, self.save_every, at_end=True)


@dataclass(slots=True)
class _Pauses:
    """Durations of evaluations or saves."""

    seconds: list[float] = field(default_factory=list)

    def typical(self, guess: float) -> float:
        """The mean of the newest three, without the first one, which includes warm-up, if there are others."""
        known = self.seconds[1:][-3:] or self.seconds
        return sum(known) / len(known) if known else guess


class Eta:
    """Estimates the time left when a line of metrics is written; each evaluation and save is reported as it ends.

    Speed is measured over the newer half of this start, and over the last minutes at most, so that a slow beginning
    or a machine that was busy for a while falls out.
    """

    def __init__(self, workload: Workload, clock: Callable[[], float] | None = None) -> None:
        self._workload = workload
        self._clock = clock or time.perf_counter
        self._evaluations, self._saves = _Pauses(), _Pauses()
        self._paused = 0.0
        self._began: float | None = None
        # steps, each with the training seconds until its end
        self._marks: deque[tuple[int, float]] = deque()

    def evaluated(self, seconds: float) -> None:
        """Add an evaluation, samples included."""
        self._evaluations.seconds.append(seconds)
        self._paused += seconds

    def saved(self, seconds: float, *, planned: bool) -> None:
        """Add a checkpoint; the cost of one that was not planned belongs to the evaluation that caused it."""
        self._paused += seconds
        if planned:
            self._saves.seconds.append(seconds)
        elif self._evaluations.seconds:
            self._evaluations.seconds[-1] += seconds

    def seconds_left(self, step: int) -> float | None:
        """The estimate after `step`, before what is due at it; None before the second line."""
        now = self._clock() - self._paused
        self._began = now if self._began is None else self._began
        self._marks.append((step, now))
        self._forget_before(now - min((now - self._began) / 2, MAX_WINDOW_SECONDS))
        before, then = self._marks[0]
        return None if step <= before else self._rest(step, (now - then) / (step - before))

    def _forget_before(self, since: float) -> None:
        """Keep the newest mark before `since`, and at least two marks."""
        while len(self._marks) > 2 and self._marks[1][1] <= since:
            self._marks.popleft()

    def _rest(self, step: int, per_step: float) -> float:
        workload = self._workload
        guess = per_step * workload.eval_size * FORWARD_SHARE
        return (
            (workload.end - step) * per_step
            + workload.evaluations_from(step) * self._evaluations.typical(guess)
            + workload.saves_from(step) * self._saves.typical(0.0)
        )


def _times(first: int, last: int, every: int, at_end: bool) -> int:
    """Count the multiples of `every` from `first` to `last`, and `last` itself if `at_end`."""
    if first > last:
        return 0
    regular = last // every - (first - 1) // every if every else 0
    is_regular = every > 0 and last % every == 0
    return regular + (at_end and not is_regular)
