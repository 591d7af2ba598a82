"""A loss over documents on several processes: its sum and gradient are those of its formula, by DDP and FSDP."""

from typing import Any

import pytest
import torch

from app.distributed.gradient_reduction import AllReduce
from app.distributed.process_group import Runtime
from app.model.training_model import TrainingModel
from app.training.train_step import Stepper
from tests.full.distributed.test_fsdp import shard, whole_gradients
from tests.harness.processes import ProcessesByCount
from tests.model.small import distance, lora, outcome
from tests.training.test_losses import batch_of, formula, kto_batch, kto_formula, kto_model, model_of, step

ROWS = (((0,), ()), ((1,), (2,)))  # of the micro-batches of each process
KTO_ROWS = (((3,), ()), ((0, 2), (1,)))


def reduction_of(runtime: Runtime, parallel: str, model: TrainingModel) -> Any:
    if parallel == "fsdp":
        return shard(runtime, model)[1]
    return AllReduce(list(model.trained().values()))


def distances_to_formula(
    runtime: Runtime, parallel: str, layout: str, adapter: Any, linear: bool, recompute: bool
) -> tuple[float, float]:
    """Of the loss and of the gradient."""
    plain = model_of(adapter)
    loss, expected = outcome(plain, lambda: formula(plain).mean())
    model = model_of(adapter, linear=linear, recompute=recompute)
    reduction = reduction_of(runtime, parallel, model)
    found, _ = step(model, [batch_of(layout, rows) for rows in ROWS[runtime.rank]], runtime, reduction)
    return abs(found / loss - 1), distance(whole_gradients(model), expected)


@pytest.mark.parametrize(
    ("parallel", "layout", "adapter", "linear", "recompute"),
    [  # each two values of any two meet
        ("ddp", "packed", None, True, False),
        ("ddp", "padded", lora(), False, False),
        ("ddp", "packed", lora(), True, True),
        ("fsdp", "padded", lora(), True, False),
        ("fsdp", "packed", None, False, False),
        ("fsdp", "padded", None, True, True),
    ],
)
def test_loss_over_documents_of_two_processes_equals_its_formula(
    processes: ProcessesByCount, parallel: str, layout: str, adapter: Any, linear: bool, recompute: bool
) -> None:
    for loss, gradient in processes(2).run(distances_to_formula, parallel, layout, adapter, linear, recompute):
        assert loss <= 1e-6
        assert gradient <= 2e-6


def distances_of_kto(runtime: Runtime, parallel: str, layout: str, adapter: Any) -> tuple[float, float]:
    """The same, of a loss whose mean is over other documents of all processes."""
    plain, model = kto_model(adapter), kto_model(adapter)
    loss, expected = outcome(plain, lambda: kto_formula(plain))
    reduction = reduction_of(runtime, parallel, model)
    optimizer = torch.optim.SGD(reduction.stepped, lr=0.0)
    stepper = Stepper(model, optimizer, runtime, clip=0.0, fp16=False, reduction=reduction)
    result = stepper.run([kto_batch(layout, rows) for rows in KTO_ROWS[runtime.rank]], 0.0)
    found = result.mean(runtime.host_group.totals([float(result.loss_sum)])[0])
    return abs(found / loss - 1), distance(whole_gradients(model), expected)


@pytest.mark.parametrize(("parallel", "layout", "adapter"), [("ddp", "packed", lora()), ("fsdp", "padded", None)])
def test_kto_of_two_processes_equals_its_formula(
    processes: ProcessesByCount, parallel: str, layout: str, adapter: Any
) -> None:
    for loss, gradient in processes(2).run(distances_of_kto, parallel, layout, adapter):
        assert loss <= 1e-6
        assert gradient <= 2e-6
