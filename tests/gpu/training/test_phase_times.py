"""Phases of a step, timed by CUDA events."""

import time
from dataclasses import replace

import pytest
import torch

from app.batch import Batch
from app.model.build import build_training_model
from app.tasks.table import loss_of
from app.tracking.formatting import PHASES
from app.training.checkpoint import Progress
from app.training.setup import stepper_of
from app.training.trainer import Prefetch, Trainer
from tests.gpu import waiting_is_an_error
from tests.training.conftest import MakeLoop, sections_of, small_run
from tests.training.test_trainer import QUIET

STEPS = 20
NAP = 0.05  # much longer than a step of the small model


@pytest.fixture
def trainer(make_loop: MakeLoop) -> Trainer:
    """A trainer on the GPU, after the steps that compile and check gradients."""
    run = small_run("recipe=lora", *QUIET)
    loop, _ = make_loop(run, 100)
    runtime = loop.parts.runtime
    model = build_training_model(sections_of(run), loss_of(run), runtime.device, run.seed, "nowhere")
    stepper = stepper_of(model, run, runtime, run.precision.kind)
    trainer = Trainer(replace(loop.parts, stepper=stepper), Progress())
    for _ in range(5):
        trainer.take_step()
    trainer.times.since_last_line()
    torch.cuda.synchronize()
    return trainer


def test_events_sum_to_the_time_of_the_steps_without_waiting(trainer: Trainer) -> None:
    started = time.perf_counter()
    with waiting_is_an_error():
        for _ in range(STEPS):
            trainer.take_step()
    means = trainer.times.since_last_line()
    seconds = time.perf_counter() - started
    assert list(means) == list(PHASES)
    assert all(means[key] > 0 for key in ("forward_seconds", "backward_seconds", "optimizer_seconds"))
    assert 0.8 * seconds < STEPS * sum(means.values()) < seconds


def test_loader_takes_time_only_while_the_gpu_is_idle(trainer: Trainer) -> None:
    def batches(step: int) -> list[Batch]:
        time.sleep(NAP)
        return trainer.parts.loader.batches(step)

    trainer.prefetch = Prefetch(batches, trainer.parts.runtime.device)
    trainer.take_step()
    trainer.take_step()
    trainer.times.since_last_line()
    trainer.take_step()
    slow = trainer.times.since_last_line()
    assert 0.8 * NAP < slow["data_seconds"] < 1.5 * NAP
    assert max(seconds for key, seconds in slow.items() if key != "data_seconds") < NAP

    trainer.parts.stepper.optimizer.register_step_post_hook(lambda *_: torch.cuda._sleep(10**9))  # about half a second
    trainer.take_step()
    busy = trainer.times.since_last_line()
    assert busy["data_seconds"] < 0.1 * NAP
    assert busy["optimizer_seconds"] > NAP
