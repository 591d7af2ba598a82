"""How long the rest of a start takes: its steps, and the evaluations and saves that are still to come."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

_LONGEST_MEMORY = 300.0  # seconds: after a change of speed the rest is wrong no longer than this
_FORWARD_SHARE = 1 / 3  # of a step, where the backward pass costs twice the forward pass


@dataclass(frozen=True, slots=True)
class Course:
    """What lies between here and the end. A distance of 0 means: at the end only."""

    end: int  # the last step of this start
    eval_every: int = 0
    save_every: int = 0
    evaluates: bool = False
    evaluates_at_end: bool = True
    eval_size: float = 0.0  # tokens of an evaluation over those of a step

    def evaluations_from(self, step: int) -> int:
        """Not made yet when `step` has just been trained."""
        return _times(step, self.end, self.eval_every, self.evaluates_at_end) if self.evaluates else 0

    def saves_from(self, step: int) -> int:
        """The same; one is always made at the end."""
        return _times(step, self.end, self.save_every, at_end=True)


@dataclass(slots=True)
class _Pauses:
    """What is not training: how often, and how long it took."""

    seconds: list[float] = field(default_factory=list)

    def typical(self, guess: float) -> float:
        """Of the newest three. The first one warms up as the first step does, if there are others."""
        known = self.seconds[1:][-3:] or self.seconds
        return sum(known) / len(known) if known else guess


class Pace:
    """Told of each pause as it ends; asked when a line is written, because only then the device is waited for.

    Speed is that of the newer half of this start, and of its last minutes at most: what was slow in the beginning
    falls out by itself, and so does a machine that was busy for a while.
    """

    def __init__(self, course: Course, clock: Callable[[], float] | None = None) -> None:
        self._course = course
        self._clock = clock or time.perf_counter
        self._evaluations, self._saves = _Pauses(), _Pauses()
        self._paused = 0.0
        self._began: float | None = None
        # steps, each with the seconds of training until it was done
        self._marks: deque[tuple[int, float]] = deque()

    def evaluated(self, seconds: float) -> None:
        """An evaluation, with the answers that are shown."""
        self._evaluations.seconds.append(seconds)
        self._paused += seconds

    def saved(self, seconds: float, *, planned: bool) -> None:
        """A checkpoint; one that was not planned is a consequence of the evaluation before it."""
        self._paused += seconds
        if planned:
            self._saves.seconds.append(seconds)
        elif self._evaluations.seconds:
            self._evaluations.seconds[-1] += seconds

    def seconds_left(self, step: int) -> float | None:
        """After `step`, before what is due at it; None as long as nothing can be said."""
        now = self._clock() - self._paused
        self._began = now if self._began is None else self._began
        self._marks.append((step, now))
        self._forget_before(now - min((now - self._began) / 2, _LONGEST_MEMORY))
        before, then = self._marks[0]
        return None if step <= before else self._rest(step, (now - then) / (step - before))

    def _forget_before(self, since: float) -> None:
        """The newest mark of that time stays, and the one before the last."""
        while len(self._marks) > 2 and self._marks[1][1] <= since:
            self._marks.popleft()

    def _rest(self, step: int, per_step: float) -> float:
        course = self._course
        guess = per_step * course.eval_size * _FORWARD_SHARE
        return (
            (course.end - step) * per_step
            + course.evaluations_from(step) * self._evaluations.typical(guess)
            + course.saves_from(step) * self._saves.typical(0.0)
        )


def _times(first: int, last: int, every: int, at_end: bool) -> int:
    """Multiples of `every` from `first` to `last`, and `last` itself."""
    if first > last:
        return 0
    regular = last // every - (first - 1) // every if every else 0
    is_regular = every > 0 and last % every == 0
    return regular + (at_end and not is_regular)
