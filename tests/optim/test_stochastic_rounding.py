"""Every optimizer on weights in bfloat16, and on one parameter at a time: nothing is lost but what rounding costs."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from app.optim import optimizers as stochastic_rounding
from app.optim.optimizers import (
    OneByOne,
    build_optimizer,
    ordinary,
    round_into,
    skips_on_device,
    step_unless,
    steps_in_backward,
)
from app.optim.requirements import BITSANDBYTES_KINDS
from app.training.storage_counter import StorageCounter
from tests.optim.small import KINDS, Regression, built, narrow, regression, section, train
from tests.optim.test_gradient_scaling import SKIPPING
from tests.optim.test_optimizer_state import equal


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_weights_are_stepped_in_float32(kind: str) -> None:
    model, optimizer = narrow(kind)
    assert isinstance(optimizer, OneByOne)
    losses = train(model, optimizer, range(60))
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    states = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, torch.Tensor)]
    narrowest = {torch.float32, torch.uint8} if kind in BITSANDBYTES_KINDS else {torch.float32}
    assert {each.dtype for each in states} <= narrowest


def test_float32_weights_get_plain_optimizer() -> None:
    _, optimizer = built("adamw")
    assert ordinary(optimizer) is optimizer
    assert not steps_in_backward(optimizer)


def drift(model: Regression, optimizer: Optimizer) -> float:
    """How far 200 steps in one direction move the weights, over how far they would exactly."""
    before = model.wide.weight.detach().double()
    for _ in range(200):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return float((before - model.wide.weight.detach().double()).mean()) / (200 * 1e-5)


def test_updates_below_spacing_of_bfloat16_are_learnt() -> None:
    """At a learning rate of 1e-5. Weights of 0.1 are 5e-4 apart in bfloat16; plainly rounded they stay as they are."""
    exact = drift(*built("adamw", lr=1e-5))
    ours = drift(*narrow("adamw", lr=1e-5))
    plain_model = regression().to(torch.bfloat16)
    plain = drift(plain_model, torch.optim.AdamW(plain_model.parameters(), lr=1e-5, weight_decay=0, fused=True))
    assert exact == pytest.approx(1, rel=0.01)
    assert ours == pytest.approx(exact, rel=0.05)
    assert plain < 0.2


def test_seed_decides_roundings() -> None:
    models = []
    for seed in (0, 0, 1):
        model = regression().to(torch.bfloat16)
        train(model, build_optimizer(section("adamw", lr=1e-4), model, seed), range(3))
        models.append(model)
    assert equal(models[0].state_dict(), models[1].state_dict())
    assert not equal(models[0].state_dict(), models[2].state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_steps_one_by_one_equal_joint_step(kind: str) -> None:
    """To the last bit, and what is saved of them is the same: a run may go on with the other."""
    model, optimizer = built(kind, weight_decay=0.01)
    apart_model, apart = built(kind, weight_decay=0.01, in_backward=True)
    assert isinstance(apart, OneByOne)
    assert train(apart_model, apart, range(6)) == train(model, optimizer, range(6))
    assert equal(apart_model.state_dict(), model.state_dict())
    assert equal(apart.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_learning_rate_of_groups_is_used(kind: str) -> None:
    model, optimizer = narrow(kind)
    train(model, optimizer, range(1))
    before = deepcopy(model.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, range(1, 2))
    assert equal(model.state_dict(), before), "what is exact already is not rounded elsewhere"


@pytest.mark.parametrize("kind", SKIPPING)
def test_skipped_step_changes_nothing(kind: str) -> None:
    model, optimizer = narrow(kind, weight_decay=0.1)
    assert skips_on_device(optimizer)
    train(model, optimizer, range(2))
    before = deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    step_unless(optimizer, torch.ones(()))
    assert equal((model.state_dict(), optimizer.state_dict()["state"]), before)


def test_float32_copies_exist_for_one_weight_at_a_time() -> None:
    """Of the two matrices of 4096 numbers: a copy, its gradient, and what it takes to round it."""
    model, optimizer = narrow("adamw")
    train(model, optimizer, range(1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    counter = StorageCounter()
    counter.ignore(model.parameters())
    counter.ignore(each for state in optimizer.state.values() for each in state.values())
    with counter:
        optimizer.step()
    assert 2 * 4 * 4096 <= counter.peak < 2.5 * 4 * 4096
    assert counter.current <= 512, "the number that stand-ins share"


def test_rows_of_shard_are_stepped_as_in_whole() -> None:
    """To the last bit: a run does not depend on the number of processes that divide its weights."""
    (whole_model, whole), (model, _) = narrow("adamw"), narrow("adamw")
    optimizers = []
    for part in range(2):
        shards = {}
        for parameter in model.parameters():
            size = -(-len(parameter) // 2)
            rows = parameter.detach()[part * size : (part + 1) * size]
            shards[parameter] = (nn.Parameter(rows), part * size * parameter[0].numel())
        optimizers.append((build_optimizer(section("adamw"), model, 5, shards), shards))
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for parameter, other in zip(whole_model.parameters(), model.parameters(), strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(torch.bfloat16)
            for _, shards in optimizers:
                rows, first = shards[other]
                rows.grad = parameter.grad.flatten()[first : first + rows.numel()].view_as(rows)
        for optimizer in (whole, *(each for each, _ in optimizers)):
            optimizer.step()
    assert equal(model.state_dict(), whole_model.state_dict())


def rounded(exact: Tensor, seed: int = 0, step: int = 0, index: int = 0) -> Tensor:
    weight = torch.empty(exact.shape, dtype=torch.bfloat16)
    round_into(weight, exact, f"{seed}/{step}/{index}")
    return weight


def spacing(value: Tensor) -> Tensor:
    """Between the two numbers of bfloat16 on either side."""
    below = (value.view(torch.int32) & -65536).view(torch.float32)
    above = ((value.view(torch.int32) & -65536) + 65536).view(torch.float32)
    return (above.double() - below.double()).abs()


@pytest.mark.parametrize("value", [1.001, -1.001, 0.3, 1.0039062, -7e-3, 123456.78, 1e-30, -3e-39, 2.5e-40], ids=str)
def test_mean_of_roundings_is_the_number(value: float) -> None:
    """Nearest rounding would be off by up to half of a spacing, cutting off by a whole one; allowed is a hundredth."""
    exact = torch.full((200_000,), value)
    mean = rounded(exact).double().mean()
    allowed = 5 * 0.5 / 200_000**0.5  # five standard errors at most, as a share of the spacing
    assert abs(mean - exact[0].double()) / spacing(exact[:1])[0] < allowed < 0.01


def test_rounding_keeps_numbers_of_bfloat16() -> None:
    """All of its 65536 patterns; those that are no number stay none."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    found = rounded(every.float())
    numbers = ~every.isnan()
    assert torch.equal(found[numbers].view(torch.int16), every[numbers].view(torch.int16))
    assert found[~numbers].isnan().all()


def test_rounding_of_large_numbers_stays_finite() -> None:
    largest = torch.finfo(torch.bfloat16).max
    assert rounded(torch.tensor([largest, -largest, 3.3e38, -3.3e38]).repeat(1000)).isfinite().all()


def test_rounding_depends_on_step_weight_and_seed() -> None:
    exact = torch.randn(64, 65, generator=torch.Generator().manual_seed(0))
    first = rounded(exact, 1, 2, 3)
    assert torch.equal(first, rounded(exact, 1, 2, 3))
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not torch.equal(first, rounded(exact, *other))


def test_rounding_leaves_rng_state_unchanged() -> None:
    before = torch.get_rng_state()
    rounded(torch.randn(100, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), before)


def test_rounding_of_any_layout_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.randn(30, 7, generator=torch.Generator().manual_seed(0))
    columns = torch.empty(7, 30, dtype=torch.bfloat16).t()
    round_into(columns, exact, "0/0/0")
    assert torch.equal(columns, rounded(exact))
    assert torch.equal(rounded(exact.t().contiguous().t()), rounded(exact))
    monkeypatch.setattr(stochastic_rounding, "PIECE_NUMBERS", 16)
    difference = (rounded(exact).double() - exact.double()).abs()
    assert (difference < spacing(exact)).all()


def test_rows_of_shard_are_rounded_as_in_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stochastic_rounding, "PIECE_NUMBERS", 16)
    exact = torch.randn(30, 7, generator=torch.Generator().manual_seed(0))
    whole = rounded(exact)
    for low, high in ((0, 10), (10, 20), (20, 30), (3, 4), (29, 30)):
        rows = torch.empty(high - low, 7, dtype=torch.bfloat16)
        round_into(rows, exact[low:high], "0/0/0", first=low * 7)
        assert torch.equal(rows, whole[low:high])


def test_rounding_counts_as_change_for_autograd() -> None:
    """Whoever kept it for its backward pass must not go on with another one silently."""
    weight = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    out = (weight * weight).sum()
    round_into(weight, torch.zeros(3), "0/0/0")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
