"""Cross-entropy and its gradient in place, by the kernel and by plain torch, against float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from app.batch import IGNORE
from app.layers.operations import plain_loss_and_grad
from tests.choices import pairwise
from tests.harness.marks import requires_interpreter
from tests.model.small import distance

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
