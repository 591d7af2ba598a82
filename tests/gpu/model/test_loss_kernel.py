"""The loss kernel on a GPU against float64."""

import pytest
import torch

from app.batch import IGNORE
from tests.model.small import distance
from tests.model.test_operations import GPU, ROUNDED, check, exact, given


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("vocabulary", [128256, 151936, 32000])
@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
def test_loss_kernel_equals_float64(vocabulary: int, dtype: torch.dtype, *, weighted: bool) -> None:
    from app.layers.triton_kernels import loss_and_grad

    logits, targets, weights = given(96, vocabulary, dtype, GPU)
    check(loss_and_grad, logits, targets, weights if weighted else None)


def test_loss_kernel_rows_beyond_32_bits() -> None:
    from app.layers.triton_kernels import loss_and_grad

    logits = torch.zeros(17000, 128256, dtype=torch.bfloat16, device=GPU)
    logits[-1, 7] = 3.0
    targets = torch.full((17000,), IGNORE, device=GPU)
    targets[-1] = 7
    wanted, gradient = exact(logits[-1:], targets[-1:], None)
    losses = torch.empty(17000, device=GPU)
    loss_and_grad(logits, targets, None, losses, True)
    torch.testing.assert_close(losses[-1:].double(), wanted, rtol=2e-6, atol=2e-6)
    assert distance(logits[-1:].double(), gradient) <= ROUNDED[torch.bfloat16]


@pytest.mark.parametrize("vocabulary", [50257, 30522])
def test_loss_kernel_of_padded_rows_equals_float64(vocabulary: int) -> None:
    from app.layers.triton_kernels import loss_and_grad

    width = -(-vocabulary // 64) * 64
    memory = torch.full((96, width), float("nan"), dtype=torch.bfloat16, device=GPU)
    logits, targets, weights = given(96, vocabulary, torch.bfloat16, GPU)
    memory[:, :vocabulary] = logits
    losses, (wanted, gradient) = torch.empty(96, device=GPU), exact(logits, targets, weights)
    loss_and_grad(memory[:, :vocabulary], targets, weights, losses, True, width)
    torch.testing.assert_close(losses.double(), wanted, rtol=2e-6, atol=2e-6)
    assert distance(memory[:, :vocabulary].double(), gradient) <= ROUNDED[torch.bfloat16]
