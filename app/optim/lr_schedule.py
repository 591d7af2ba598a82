"""Learning rates as pure functions of the step; no torch.

Warmup is linear and reaches the peak at the first step after it. A decay starts at the peak and would reach
`final_fraction` one step after the last, so no step has a learning rate of zero.
"""

import math
from collections.abc import Callable

from app.config.schema import ScheduleConfig

# (section, step, first step after the warmup, number of steps) -> fraction of the peak
Shape = Callable[[ScheduleConfig, int, int, int], float]


def learning_rate(config: ScheduleConfig, peak: float, step: int, total: int) -> float:
    """Return the learning rate of `step` (counted from 0) out of `total`."""
    assert 0 <= step < total, (step, total)
    warmup = warmup_steps(config, total)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    return peak * SCHEDULES[config.kind](config, step, warmup, total)


def warmup_steps(config: ScheduleConfig, total: int) -> int:
    """Return the number of warmup steps: at least one if there is a warmup, and never all steps."""
    steps = config.warmup_steps
    if steps is None:
        steps = max(1, round(config.warmup_fraction * total)) if config.warmup_fraction else 0
    return min(steps, total - 1)


def _linear(config: ScheduleConfig, step: int, warmup: int, total: int) -> float:
    return 1 - (1 - config.final_fraction) * (step - warmup) / (total - warmup)


def _cosine(config: ScheduleConfig, step: int, warmup: int, total: int) -> float:
    progress = (step - warmup) / (total - warmup)
    return 1 - (1 - config.final_fraction) * (1 - math.cos(math.pi * progress)) / 2


def _wsd(config: ScheduleConfig, step: int, warmup: int, total: int) -> float:
    decay = round(config.decay_fraction * total)
    start = max(warmup, total - decay)
    return 1.0 if step < start else _linear(config, step, start, total)


SCHEDULES: dict[str, Shape] = {"constant": lambda *_: 1.0, "linear": _linear, "cosine": _cosine, "wsd": _wsd}
