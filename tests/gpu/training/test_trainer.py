"""Micro-batches made before they are asked for are those that would have been made; between lines nobody waits."""

from dataclasses import replace

import pytest
import torch

from app.model.build import build_training_model
from app.tasks.table import loss_of
from app.training.setup import stepper_of
from tests.gpu import waiting_is_an_error
from tests.training.conftest import MakeLoop, sections_of, small_run
from tests.training.test_train_step import AS_THEY_COME, BF16, FULL
from tests.training.test_trainer import QUIET


@pytest.mark.parametrize(
    "words", [("recipe=lora",), ("recipe=full", *BF16), (*FULL, *BF16, AS_THEY_COME)], ids=" ".join
)
def test_whole_steps_do_not_wait_for_the_device(words: tuple[str, ...], make_loop: MakeLoop) -> None:
    run = small_run(*words, *QUIET)
    loop, _ = make_loop(run, 20)
    device = loop.parts.runtime.device
    model = build_training_model(sections_of(run), loss_of(run), device, run.seed, "nowhere")
    loop.parts = replace(loop.parts, stepper=stepper_of(model, run, loop.parts.runtime, run.precision.kind))
    for _ in range(3):
        loop.take_step()
    ready = loop.prefetch.ready
    assert ready is not None
    assert all(tensor.is_pinned() for batch in ready[1] for tensor in batch.tensors)
    torch.cuda.synchronize()
    with waiting_is_an_error():
        for _ in range(4):
            loop.take_step()
    assert not any(bool(each) for each in loop.skipped)
