"""A loss over documents on several processes: its sum and gradient are those of its formula, by DDP and FSDP."""

from typing import Any

import pytest

from app.distributed.process_group import Runtime
from tests.full.distributed.test_fsdp import shard, whole_gradients
from tests.harness.processes import ProcessesByCount
from tests.model.small import distance, lora, outcome
from tests.training.test_losses import batch_of, formula, model_of, step

ROWS = (((0,), ()), ((1,), (2,)))  # of the micro-batches of each process


def distances_to_formula(
    runtime: Runtime, parallel: str, layout: str, adapter: Any, linear: bool, recompute: bool
) -> tuple[float, float]:
    """Of the loss and of the gradient."""
    plain = model_of(adapter)
    loss, expected = outcome(plain, lambda: formula(plain).mean())
    model = model_of(adapter, linear=linear, recompute=recompute)
    if parallel == "fsdp":
        _, reduction = shard(runtime, model)
    else:
        reduction = runtime.reduction(list(model.trained().values()), None, whole_matrices=False)
    found, _ = step(model, [batch_of(layout, rows) for rows in ROWS[runtime.rank]], runtime, reduction)
    return abs(found / loss - 1), distance(whole_gradients(model), expected)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("adapter", [None, lora()], ids=["full", "lora"])
@pytest.mark.parametrize(("linear", "recompute"), [(True, False), (False, False), (True, True)])
def test_loss_over_documents_of_two_processes_equals_its_formula(
    processes: ProcessesByCount, parallel: str, layout: str, adapter: Any, linear: bool, recompute: bool
) -> None:
    for loss, gradient in processes(2).run(distances_to_formula, parallel, layout, adapter, linear, recompute):
        assert loss <= 1e-6
        assert gradient <= 2e-6
