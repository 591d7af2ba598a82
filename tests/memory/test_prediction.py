"""What a run is told, and what it measures of itself."""

import pytest
import torch

from app.batch import Batch
from app.config.schema import RunConfig
from app.distributed.environment import World
from app.distributed.process_group import HostGroup, Runtime
from app.memory.estimate import predict
from app.memory.planner import largest_bins, recompute_fewest
from app.model.build import build_training_model
from app.model.checks import choose_loss_head
from app.optim.optimizers import build_optimizer
from app.training.auto_batch import found_layers, settled_bins
from app.training.choices import Choices
from app.training.memory import Forecast, Measured, Predicted
from app.training.resolve import sections_of
from app.training.train_step import Stepper
from tests.memory.truth import PACKED, batch_of, small_run

ALONE = Runtime(None, torch.device("cpu"), HostGroup(0, 1), 1)
CHOICES = Choices("fp32", "sdpa")


def stepper_of(run: RunConfig) -> Stepper:
    trainee = build_training_model(sections_of(run, CHOICES), torch.device("cpu"), run.seed, "nowhere")
    choose_loss_head(trainee, batch_of(PACKED))
    return Stepper(trainee, build_optimizer(run.optimizer, trainee), ALONE, run.training.clip, fp16=False)


def test_a_counted_step_computes_what_any_step_does() -> None:
    """To the last bit."""
    run = small_run("recipe=qlora", "adapter.dropout=0.1", "training.recompute=1")
    batches = [batch_of(PACKED)] * 2
    plain, counted = stepper_of(run), stepper_of(run)
    measured = Measured(ALONE, steps=10)
    for stepper, step in ((plain, plain.run), (counted, None)):
        torch.manual_seed(1)
        for _ in range(3):
            result = step(batches, 1e-2) if step else measured.run(stepper, batches, 1e-2)
        last = float(result.loss_sum), float(result.grad_norm)
        stepper.last = last  # type: ignore[attr-defined]
    assert plain.last == counted.last  # type: ignore[attr-defined]
    for mine, other in zip(plain.trainee.parameters(), counted.trainee.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert measured.bytes is not None


def test_the_prediction_of_a_step_is_what_is_measured() -> None:
    run = small_run("recipe=lora")
    batch = batch_of(PACKED)
    predicted = predict(run, CHOICES, batch, 1, "cpu")
    stepper, measured = stepper_of(run), Measured(ALONE, steps=2)
    measured.run(stepper, [batch], 1e-3)
    assert measured.bytes is None, "the first step has no states before"
    measured.run(stepper, [batch], 1e-3)
    assert measured.bytes is not None
    assert abs(predicted.bytes - measured.bytes) <= 4096
    assert predicted.where in Forecast.made(predict, run, CHOICES, batch, 1, "cpu").words


def test_a_single_step_is_measured_too() -> None:
    stepper, measured = stepper_of(small_run("recipe=lora")), Measured(ALONE, steps=1)
    measured.run(stepper, [batch_of(PACKED)], 1e-3)
    assert measured.bytes is not None


def test_a_prediction_that_fails_is_one_line() -> None:
    def fails(*_given: object) -> Predicted:
        raise ValueError("no such shape\nand more")

    batch: Batch = batch_of(PACKED)
    forecast = Forecast.made(fails, small_run(), CHOICES, batch, 1, "cpu")
    assert forecast.predicted is None
    assert forecast.rows() == [("memory", "no prediction for this model (ValueError: no such shape)")]
    assert forecast.facts() == {}


def test_a_model_that_is_divided_is_not_planned_and_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers are recomputed, and bins are as the model suggests."""
    for module in ("estimate", "planner"):
        monkeypatch.setattr(f"app.memory.{module}.world", lambda: World(0, 2, 0, 2))
    reason = "parallel=fsdp: the memory of a run that divides its model among 2 processes is not planned"
    run, batch = small_run("parallel=fsdp", "batching.tokens=auto"), batch_of(PACKED)
    forecast = Forecast.made(predict, run, CHOICES, batch, 1, "cpu")
    assert forecast.predicted is None
    assert forecast.words.startswith(reason)
    count, remark = found_layers(lambda: recompute_fewest(run, CHOICES, batch, 1, 3), HostGroup(0, 1), 3)
    assert count == 3
    assert remark.startswith(reason)
    _, (told,) = settled_bins(run, CHOICES, 3, {}, largest_bins, HostGroup(0, 1))
    assert reason in told


def test_predicting_leaves_random_numbers_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    predict(small_run("recipe=lora", "adapter.dropout=0.1"), CHOICES, batch_of(PACKED), 1, "cpu")
    assert torch.equal(before, torch.get_rng_state())
