"""Every operation of ours says what it costs."""

import importlib
import pkgutil
import re

import pytest
import torch

import app.memory
import app.model
from app.layers.operations import COSTS, OperationCost, cost_of
from app.training.storage_counter import StorageCounter

TOY = "app_test::twice"  # stays defined in this process


def test_each_operation_of_ours_has_a_cost() -> None:
    for package in (app.model, app.memory):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    names: list[str] = torch._C._dispatch_get_all_op_names()
    ours = sorted({name.partition(".")[0] for name in names if re.match(r"app[a-z0-9_]*::", name) and name != TOY})
    assert len(ours) >= 8
    assert {name: cost_of(name) for name in ours} == {name: COSTS[name] for name in ours}


def test_operation_counts_what_it_says_and_needs_to_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = OperationCost(cpu_bytes=lambda x: 3 * x.nbytes, gpu_bytes=lambda x: 5 * x.nbytes)
    monkeypatch.setitem(COSTS, TOY, cost)
    torch.library.define(TOY, "(Tensor x) -> Tensor")
    torch.library.impl(TOY, "cpu", lambda x: 2 * x)
    x = torch.ones(256)
    for as_on_gpu, taken in ((False, 3), (True, 5)):
        with StorageCounter(as_on_gpu=as_on_gpu) as counter:
            counter.ignore([x])
            out = torch.ops.app_test.twice(x)
        assert counter.peak == (1 + taken) * out.nbytes
    monkeypatch.delitem(COSTS, TOY)
    with pytest.raises(LookupError, match=f"{TOY} has no OperationCost"), StorageCounter():
        torch.ops.app_test.twice(x)
