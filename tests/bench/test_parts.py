"""The clock, the counts, the shapes."""

import time
from dataclasses import replace

import pytest
import torch

from app.model.build import count_weights
from app.training.auto_settings import Choices, sections_of
from scripts.bench.contest import run_of
from scripts.bench.machine import Clock, mfu
from tests.bench.test_workload import CONTEST


def test_clock_separates_warm_up_and_steps() -> None:
    clock = Clock(torch.device("cpu"), warm_up=2, steps=2)
    clock.begin()
    for pause in (0.05, 0.0, 0.02, 0.02):
        time.sleep(pause)
        clock.mark(torch.tensor(pause))
    assert clock.losses == pytest.approx([0.05, 0, 0.02, 0.02])
    assert clock.first_step >= 0.05
    assert len(clock.step_seconds) == 2
    assert all(0.02 <= seconds < 0.05 for seconds in clock.step_seconds)
    assert 0 <= clock.cpu_seconds < 0.04, "sleeping is no work"


@pytest.mark.parametrize(("shape", "billions"), [("llama_1b", 1.236), ("llama_8b", 8.030), ("llama_70b", 70.554)])
def test_shapes_have_weights_of_their_models(shape: str, billions: float) -> None:
    run = run_of(replace(CONTEST, model=shape, method="full", settings=()))
    sections = sections_of(run, Choices(precision="bf16", attention="sdpa"))
    assert count_weights(sections).total == pytest.approx(billions * 1e9, rel=1e-3)
    assert run.model.weights == "random"


def test_mfu_counts_four_or_six_operations_a_weight() -> None:
    assert mfu(CONTEST, 1_000_000, 1e6, 8.0) == pytest.approx(0.5)
    assert mfu(replace(CONTEST, method="full"), 1_000_000, 1e6, 8.0) == pytest.approx(0.75)
    assert mfu(CONTEST, 1_000_000, 1e6, None) is None
