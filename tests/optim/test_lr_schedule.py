from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from app.config.conf_files import CONF, choices_by_group
from app.config.schema import ScheduleConfig
from app.optim.lr_schedule import learning_rate, warmup_steps

KINDS = choices_by_group()["schedule"]


def section(kind: str, **values: Any) -> ScheduleConfig:
    in_file = OmegaConf.load(CONF / "schedule" / f"{kind}.yaml")
    schema = OmegaConf.structured(ScheduleConfig)
    return cast(ScheduleConfig, OmegaConf.to_object(OmegaConf.merge(schema, in_file, values)))


def curve(config: ScheduleConfig, total: int, peak: float = 1.0) -> list[float]:
    return [learning_rate(config, peak, step, total) for step in range(total)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
        ("cosine", [1 / 3, 2 / 3, 1, 0.965746, 0.868198, 0.722208, 0.55, 0.377792, 0.231802, 0.134254]),
        ("wsd", [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325]),
    ],
)
def test_learning_rate_of_each_schedule(kind: str, expected: list[float]) -> None:
    values = {"cosine": {"final_fraction": 0.1}, "wsd": {"final_fraction": 0.1, "decay_fraction": 0.4}}
    config = section(kind, warmup_fraction=0.2, **values.get(kind, {}))
    assert curve(config, 10) == pytest.approx(expected, abs=1e-6)
    assert curve(config, 10, peak=3e-4) == pytest.approx([3e-4 * value for value in expected], abs=1e-9)


@pytest.mark.parametrize(("kind", "final"), [("linear", 0.0), ("linear", 0.3), ("cosine", 0.1), ("wsd", 0.2)])
def test_learning_rate_of_long_run_ends_near_final_fraction(kind: str, final: float) -> None:
    last = curve(section(kind, final_fraction=final), 10_000)[-1]
    assert final <= last < final + 0.001
    assert last > 0


@pytest.mark.parametrize(
    ("fraction", "total", "expected"), [(0.0, 100, 0), (0.03, 100, 3), (0.03, 5, 1), (0.9, 2, 1), (0.03, 1, 0)]
)
def test_warmup_steps_at_least_one_and_never_all(fraction: float, total: int, expected: int) -> None:
    assert warmup_steps(section("cosine", warmup_fraction=fraction), total) == expected


@pytest.mark.parametrize(("steps", "total", "expected"), [(0, 100, 0), (7, 100, 7), (100, 100, 99), (None, 100, 0)])
def test_warmup_in_steps(steps: int | None, total: int, expected: int) -> None:
    assert warmup_steps(section("cosine", warmup_fraction=None, warmup_steps=steps), total) == expected


@given(
    kind=st.sampled_from(KINDS),
    total=st.integers(1, 60),
    warmup=st.floats(0, 0.99),
    final=st.floats(0, 1),
    decay=st.floats(0, 1),
    peak=st.floats(1e-8, 10),
)
def test_learning_rate_rises_to_peak_then_never_again(
    kind: str, total: int, warmup: float, final: float, decay: float, peak: float
) -> None:
    config = section(kind, warmup_fraction=warmup, final_fraction=final, decay_fraction=decay)
    rates = curve(config, total, peak)
    top = warmup_steps(config, total)
    assert all(0 < rate <= peak for rate in rates)
    assert rates[top] == peak
    assert all(a < b for a, b in pairwise(rates[: top + 1]))
    assert all(a >= b for a, b in pairwise(rates[top:]))
    if kind != "constant":
        assert min(rates[top:]) >= final * peak * (1 - 1e-12)
