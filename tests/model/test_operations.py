"""Custom operations: their costs, and the loss kernel compared with plain torch and float64."""

import importlib
import pkgutil
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import app.memory
import app.model
from app.batch import IGNORE
from app.layers.operations import COSTS, OperationCost, cost_of, plain_loss_and_grad
from app.training.storage_counter import StorageCounter
from tests.choices import pairwise
from tests.harness.marks import requires_interpreter
from tests.model.small import distance

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


CPU, GPU = torch.device("cpu"), torch.device("cuda")
ROUNDED = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def given(rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (4 * torch.randn(rows, vocabulary, generator=generator)).to(dtype)
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    targets[1::4] = IGNORE
    logits[0, targets[0]] = 30.0  # as good as certain: its loss is all in the last digits
    weights = torch.rand(rows, generator=generator) * 3
    return logits.to(device), targets.to(device), weights.to(device)


def exact(logits: Tensor, targets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    leaf = logits.double().requires_grad_()
    losses = F.cross_entropy(leaf, targets, ignore_index=IGNORE, reduction="none")
    losses = losses if weights is None else losses * weights
    return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]


def check(loss_and_grad: Any, logits: Tensor, targets: Tensor, weights: Tensor | None) -> None:
    wanted, gradient = exact(logits, targets, weights)
    before = logits.clone()
    losses = torch.full((len(logits),), float("nan"), device=logits.device)
    loss_and_grad(before, targets, weights, losses, False)
    torch.testing.assert_close(losses.double(), wanted, rtol=2e-6, atol=2e-6)
    losses.fill_(float("nan"))
    loss_and_grad(logits, targets, weights, losses, True)
    torch.testing.assert_close(losses.double(), wanted, rtol=2e-6, atol=2e-6)
    assert distance(logits.double(), gradient) <= ROUNDED[logits.dtype]
    assert not logits[targets == IGNORE].any()
    assert not losses[targets == IGNORE].any()


@pytest.mark.parametrize(("dtype", "vocabulary", "weighted"), pairwise(tuple(ROUNDED), (37, 5000), (False, True)))
def test_plain_loss_and_grad_equals_float64(vocabulary: int, dtype: torch.dtype, *, weighted: bool) -> None:
    """5000 logits make pieces of 52 rows."""
    logits, targets, weights = given(130, vocabulary, dtype, CPU)
    check(plain_loss_and_grad, logits, targets, weights if weighted else None)


@requires_interpreter
@pytest.mark.parametrize(("vocabulary", "dtype", "weighted"), [(5, torch.float16, True), (19001, torch.float32, False)])
def test_loss_kernel_equals_float64(vocabulary: int, dtype: torch.dtype, *, weighted: bool) -> None:
    """19001 logits are three blocks, the last of them not full."""
    from app.layers.triton_kernels import loss_and_grad

    logits, targets, weights = given(9, vocabulary, dtype, CPU)
    check(loss_and_grad, logits, targets, weights if weighted else None)


@requires_interpreter
def test_loss_kernel_follows_stride_of_rows() -> None:
    from app.layers.triton_kernels import loss_and_grad

    memory = torch.zeros(6, 100)
    logits, targets, _ = given(6, 64, torch.float32, CPU)
    memory[:, :64] = logits
    check(loss_and_grad, memory[:, :64], targets, None)
    assert not memory[:, 64:].any()


@requires_interpreter
def test_loss_kernel_reads_nothing_of_padding_and_clears_it() -> None:
    """An odd vocabulary in rows of whole vectors: what lies behind the logits may be anything."""
    from app.layers.triton_kernels import loss_and_grad

    memory = torch.full((6, 128), float("nan"))
    logits, targets, weights = given(6, 101, torch.float32, CPU)
    memory[:, :101] = logits
    losses, (wanted, gradient) = torch.empty(6), exact(logits, targets, weights)
    loss_and_grad(memory[:, :101], targets, weights, losses, True, 128)
    torch.testing.assert_close(losses.double(), wanted, rtol=2e-6, atol=2e-6)
    assert distance(memory[:, :101].double(), gradient) <= ROUNDED[torch.float32]
    assert not memory[:, 101:].any()
