"""Predicted memory of a run against measured memory."""

import pytest
import torch

from app.batch import Batch
from app.config.schema import RunConfig
from app.distributed.launch import World
from app.distributed.process_group import HostGroup, Runtime
from app.memory.planner import LocalPlanner
from app.model.build import build_training_model, choose_loss_head
from app.tasks.table import loss_of
from app.training.auto_settings import Choices, sections_of
from app.training.memory import Forecast, Measured, Predicted
from app.training.setup import stepper_of
from app.training.train_step import Stepper
from tests.memory.truth import PACKED, batch_of, small_run

SINGLE_PROCESS = Runtime(None, torch.device("cpu"), HostGroup(0, 1), 1)
CHOICES = Choices("fp32", "sdpa")
PLANNER = LocalPlanner()


def single_stepper(run: RunConfig) -> Stepper:
    model = build_training_model(sections_of(run, CHOICES), loss_of(run), torch.device("cpu"), run.seed, "nowhere")
    choose_loss_head(model, batch_of(PACKED))
    return stepper_of(model, run, SINGLE_PROCESS, CHOICES.precision)


def test_measured_step_equals_plain_step_bit_for_bit() -> None:
    run = small_run("recipe=qlora", "adapter.dropout=0.1", "training.recompute=1")
    batches = [batch_of(PACKED)] * 2
    plain, counted = single_stepper(run), single_stepper(run)
    measured = Measured(SINGLE_PROCESS, steps=10)
    for stepper, step in ((plain, plain.run), (counted, None)):
        torch.manual_seed(1)
        for _ in range(3):
            result = step(batches, 1e-2) if step else measured.run(stepper, batches, 1e-2)
        last = float(result.loss_sum), float(result.grad_norm)
        stepper.last = last  # type: ignore[attr-defined]
    assert plain.last == counted.last  # type: ignore[attr-defined]
    for mine, other in zip(plain.model.parameters(), counted.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert measured.bytes is not None


def test_prediction_equals_measured_peak() -> None:
    run = small_run("recipe=lora")
    batch = batch_of(PACKED)
    predicted = PLANNER.predict(run, CHOICES, batch, 1, "cpu")
    stepper, measured = single_stepper(run), Measured(SINGLE_PROCESS, steps=2)
    measured.run(stepper, [batch], 1e-3)
    assert measured.bytes is None, "the first step starts without optimizer states"
    measured.run(stepper, [batch], 1e-3)
    assert measured.bytes is not None
    assert abs(predicted.bytes - measured.bytes) <= 4096
    assert predicted.where in Forecast.made(PLANNER.predict, run, CHOICES, batch, 1, "cpu").text


def test_measured_run_of_one_step_has_peak() -> None:
    stepper, measured = single_stepper(small_run("recipe=lora")), Measured(SINGLE_PROCESS, steps=1)
    measured.run(stepper, [batch_of(PACKED)], 1e-3)
    assert measured.bytes is not None


def test_failed_prediction_is_one_line() -> None:
    def fails(*_args: object) -> Predicted:
        raise ValueError("no such shape\nand more")

    batch: Batch = batch_of(PACKED)
    forecast = Forecast.made(fails, small_run(), CHOICES, batch, 1, "cpu")
    assert forecast.predicted is None
    assert forecast.rows() == [("memory", "no plan for this model (ValueError: no such shape)")]
    assert forecast.facts() == {}


def test_prediction_of_sharded_run_has_share_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run, batch = small_run("recipe=full", "parallel=fsdp", "training.recompute=0"), batch_of(PACKED)
    alone = PLANNER.predict(run, CHOICES, batch, 1, "cpu")
    monkeypatch.setattr("app.memory.planner.world", lambda: World(0, 4, 0, 4))
    shared = PLANNER.predict(run, CHOICES, batch, 1, "cpu")
    assert shared.anatomy["trained_weights"] == pytest.approx(alone.anatomy["trained_weights"] / 4, rel=0.02)
    auto = small_run("recipe=full", "parallel=fsdp", "training.recompute=auto")
    (layers, _), remark = PLANNER.recompute(auto, CHOICES, batch, 1, 3)
    assert layers == 0
    assert remark.startswith("training.recompute=auto: 0 of 3 layers, which needs")


def test_predict_leaves_rng_state_unchanged() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    PLANNER.predict(small_run("recipe=lora", "adapter.dropout=0.1"), CHOICES, batch_of(PACKED), 1, "cpu")
    assert torch.equal(before, torch.get_rng_state())
