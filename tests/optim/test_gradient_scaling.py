from copy import deepcopy

import pytest
import torch

from app.optim.optimizers import skips_on_device, step_unless
from tests.optim.small import KINDS, built, train
from tests.optim.test_optimizer_state import equal

SKIPPING = ("adamw", "sgd")


def test_skips_on_device_is_true_for_fused_kinds_of_torch() -> None:
    assert {kind for kind in KINDS if skips_on_device(built(kind)[1])} == set(SKIPPING)


@pytest.mark.parametrize("kind", SKIPPING)
def test_skipped_step_changes_nothing(kind: str) -> None:
    model, optimizer = built(kind, weight_decay=0.1)
    train(model, optimizer, range(2))
    before = deepcopy((model.state_dict(), optimizer.state_dict()))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    step_unless(optimizer, torch.ones(()))
    assert equal((model.state_dict(), optimizer.state_dict()), before)


@pytest.mark.parametrize("kind", SKIPPING)
def test_skipped_first_step_leaves_next_ones_right(kind: str) -> None:
    model, optimizer = built(kind)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf)
    step_unless(optimizer, torch.ones(()))
    optimizer.zero_grad()
    undisturbed_model, undisturbed = built(kind)
    assert train(model, optimizer, range(3)) == train(undisturbed_model, undisturbed, range(3))
    assert equal(model.state_dict(), undisturbed_model.state_dict())
