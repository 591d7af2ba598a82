"""The time left, against runs whose end is known; evaluations and saves: test_trainer.py."""

from collections.abc import Callable
from unittest.mock import patch

import numpy as np

from app.training.eta import Eta

Line = tuple[float, float | None, float]  # seconds since the start, the time left as estimated, and as it was


def estimates(end: int, seconds_of: Callable[[int], float], every: int = 5) -> list[Line]:
    now, lines = 1000.0, []
    eta = Eta(end, {})
    for step in range(1, end + 1):
        now += seconds_of(step)
        if step == 1 or step % every == 0 or step == end:
            with patch("time.perf_counter", return_value=now):
                lines.append((now, eta.seconds_left(step)))
    return [(at - 1000.0, left, now - at) for at, left in lines]


def largest_error(lines: list[Line], after: float = 60.0) -> float:
    """Relative to the time that was left, of all lines that came so many seconds after the start."""
    errors = [abs((left or 0.0) - true) / true for since, left, true in lines if since >= after and true > 0]
    assert len(errors) >= 3, "the run is too short to say anything"
    return max(errors)


def test_eta_forgets_slow_first_steps() -> None:
    assert largest_error(estimates(600, lambda step: 20.0 if step == 1 else 1.0 if step <= 10 else 0.5)) <= 0.1


def test_eta_averages_uneven_steps() -> None:
    lengths = np.random.default_rng(0).uniform(0.25, 0.75, 1001)
    assert largest_error(estimates(1000, lambda step: float(lengths[step]))[:-40]) <= 0.1


def test_eta_adapts_to_a_change_of_speed() -> None:
    """A machine that has another run for its first hour: what was then says nothing of the rest."""
    lines = estimates(20_000, lambda step: 1.5 if step <= 2400 else 0.5, every=50)
    assert largest_error(lines, after=3600 + 300) <= 0.1
