"""Seconds of forward, backward, optimizer and waiting for data, per step."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from app.batch import Batch
from app.data.loader import Loader
from app.signals import StopRequest
from app.tracking.formatting import PHASES
from app.tracking.output_dir import RunFolder
from app.training.final_model import result_of
from app.training.trainer import Prefetch, Trainer
from tests.harness.scarcity import scarce
from tests.training.conftest import MakeLoop, small_run

CPU = torch.device("cpu")
ALONE = ("eval.every=0", "checkpoint.every=0", "record.every=1")  # each step has a line, and nothing between them
NAP = 0.1  # much longer than a phase of the small model


@pytest.mark.parametrize(
    ("words", "micro_batches"),
    [((), 1), ((), 3), (("recipe=full", "optimizer.in_backward=true", "training.clip=0"), 1)],
    ids=["one micro-batch", "three micro-batches", "in backward"],
)
def test_phases_sum_to_the_time_of_a_step(
    words: tuple[str, ...], micro_batches: int, make_loop: MakeLoop, loader_of: Callable[..., Loader]
) -> None:
    loop, notebook = make_loop(small_run(*words, *ALONE), 6)
    loader = loader_of(8, micro_batches)
    loop.parts, loop.prefetch = replace(loop.parts, loader=loader), Prefetch(loader.batches, CPU)
    assert loop.fit(StopRequest())
    for line in notebook.steps:
        assert all(line[key] > 0 for key in PHASES)
        assert sum(line[key] for key in PHASES) < line["seconds"]
    assert sum(line[key] for line in notebook.steps for key in PHASES) > 0.8 * loop.speed["seconds"]
    for key in PHASES:
        assert result_of(loop, None)[key] == pytest.approx(fmean(line[key] for line in notebook.steps[2:]))


def sleep(*_: Any) -> None:
    time.sleep(NAP)


def slow_loader(loop: Trainer) -> None:
    def batches(step: int) -> list[Batch]:
        sleep()
        return loop.parts.loader.batches(step)

    loop.prefetch = Prefetch(batches, CPU)


def slow_forward(loop: Trainer) -> None:
    loop.parts.stepper.model.register_forward_hook(sleep)


def slow_backward(loop: Trainer) -> None:
    next(iter(loop.parts.stepper.model.trained().values())).register_post_accumulate_grad_hook(sleep)


def slow_update(loop: Trainer) -> None:
    loop.parts.stepper.optimizer.register_step_pre_hook(sleep)


@pytest.mark.parametrize(
    ("key", "slow"),
    {
        "data_seconds": slow_loader,
        "forward_seconds": slow_forward,
        "backward_seconds": slow_backward,
        "optimizer_seconds": slow_update,
    }.items(),
)
def test_slow_phase_shows_in_its_own_number_only(
    key: str, slow: Callable[[Trainer], None], make_loop: MakeLoop
) -> None:
    loop, notebook = make_loop(small_run("recipe=full", *ALONE), 6)
    slow(loop)
    loop.fit(StopRequest())
    fastest = {key: min(line[key] for line in notebook.steps[2:-1]) for key in PHASES}  # nothing follows the last step
    assert [name for name, seconds in fastest.items() if seconds >= NAP] == [key]


def test_profiled_and_repeated_steps_are_left_out(make_loop: MakeLoop, tmp_path: Path) -> None:
    loop, notebook = make_loop(small_run("training.profile_step=3", *ALONE), 5)
    notebook.folder = RunFolder(tmp_path)
    with scarce("backward", 120, calls=6):  # two layers: the fourth step is the first that is out of memory
        loop.fit(StopRequest())
    assert any("step 4: out of memory" in message for message in notebook.messages)
    timed = {line["step"]: line for line in notebook.steps if "forward_seconds" in line}
    assert list(timed) == [1, 2, 5]
    assert loop.times.of_run() == {key: timed[5][key] for key in PHASES}


def test_line_of_several_steps_has_their_mean(make_loop: MakeLoop) -> None:
    loop, notebook = make_loop(small_run(*ALONE[:2], "record.every=4"), 5)
    loop.fit(StopRequest())
    _, line, _ = notebook.steps
    assert line["step"] == 4
    assert 0.6 * line["seconds"] < 3 * sum(line[key] for key in PHASES) < line["seconds"]


def test_run_of_warmup_steps_only_has_no_mean(make_loop: MakeLoop) -> None:
    loop, notebook = make_loop(small_run(*ALONE), 2)
    loop.fit(StopRequest())
    assert all(PHASES.keys() <= line.keys() for line in notebook.steps)
    assert not PHASES.keys() & result_of(loop, None).keys()
