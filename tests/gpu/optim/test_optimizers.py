"""What only a GPU can show: paging, and steps that do not wait for the device."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from app.optim.optimizer_state import allocate_states, drop_states, flatten, load_state
from app.optim.optimizers import build_optimizer, round_into, step_unless
from app.optim.requirements import PAGED_KINDS
from tests.gpu import waiting_is_an_error
from tests.optim.small import KINDS, section
from tests.optim.test_optimizer_state import SKIPPING


def large() -> nn.Linear:
    """bitsandbytes pages states of 100,000 elements and more."""
    torch.manual_seed(0)
    return nn.Linear(512, 512, device="cuda")


def train(model: nn.Linear, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(16, 512, generator=torch.Generator().manual_seed(step)).cuda()
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["paged_adamw_8bit", "paged_adamw_32bit"])
def test_paged_states_are_still_paged_after_loading_and_go_on_the_same(kind: str, tmp_path: Path) -> None:
    whole_model = large()
    expected = train(whole_model, build_optimizer(section(kind), whole_model), range(6))

    model = large()
    optimizer = build_optimizer(section(kind), model)
    losses = train(model, optimizer, range(3))
    assert optimizer.state[model.weight]["state1"].is_paged
    tensors, plain = flatten(optimizer.state_dict())
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, tmp_path / "o.safetensors")

    again = build_optimizer(section(kind), model)
    load_state(again, load_file(tmp_path / "o.safetensors"), plain)
    for key in ("state1", "state2"):
        assert again.state[model.weight][key].is_paged
    assert losses + train(model, again, range(3, 6)) == expected


@pytest.mark.parametrize("kind", SKIPPING)
def test_a_step_that_may_be_skipped_does_not_wait_for_the_device(kind: str) -> None:
    model = large()
    optimizer = build_optimizer(section(kind), model)
    train(model, optimizer, range(2))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    flag = torch.ones((), device="cuda")
    torch.cuda.synchronize()
    with waiting_is_an_error():
        step_unless(optimizer, flag)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_states_made_ahead_leave_no_trace(kind: str) -> None:
    """To the bit, and paged memory is the same one afterwards."""
    plain_model = large()
    plain = build_optimizer(section(kind, weight_decay=0.1), plain_model)
    expected = train(plain_model, plain, range(4))
    model = large()
    optimizer = build_optimizer(section(kind, weight_decay=0.1), model)
    before = model.weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    allocate_states(optimizer)
    assert torch.equal(model.weight, before)
    drop_states(optimizer)
    optimizer.zero_grad()
    assert bool(optimizer.state) == (kind in PAGED_KINDS)
    assert train(model, optimizer, range(4)) == expected
    assert torch.equal(model.weight, plain_model.weight)


def test_rounding_on_the_device_is_right_on_average_and_waits_for_nobody() -> None:
    exact = torch.full((1 << 20,), 1.001, device="cuda")
    weight = torch.empty(exact.shape, dtype=torch.bfloat16, device="cuda")
    again = torch.empty_like(weight)
    torch.cuda.synchronize()
    with waiting_is_an_error():
        round_into(weight, exact, "1/2/3")
        round_into(again, exact, "1/2/3")
    assert torch.equal(weight, again)
    assert sorted(weight.float().unique().tolist()) == [1.0, 1 + 1 / 128]
    assert float(weight.double().mean()) == pytest.approx(float(exact[0].double()), abs=5 * 0.5 / 128 / 1024)
    every = torch.arange(-(1 << 15), 1 << 15, device="cuda", dtype=torch.int32).to(torch.int16)
    patterns = every.view(torch.bfloat16)
    found = torch.empty_like(patterns)
    round_into(found, patterns.float(), "0/0/0")
    assert torch.equal(found[~patterns.isnan()].view(torch.int16), every[~patterns.isnan()])
    assert found[patterns.isnan()].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer_steps_weights_in_bfloat16(kind: str) -> None:
    model = large().to(torch.bfloat16)
    optimizer = build_optimizer(section(kind), model)
    losses = []
    for step in range(30):
        x = torch.randn(64, 512, generator=torch.Generator().manual_seed(step)).cuda().bfloat16()
        loss = (model(x) - x.flip(1)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.parametrize("kind", SKIPPING)
def test_weights_in_bfloat16_are_stepped_without_waiting(kind: str) -> None:
    model = large().to(torch.bfloat16)
    optimizer = build_optimizer(section(kind), model)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        flag = torch.zeros((), device="cuda")
        torch.cuda.synchronize()
        if optimizer.state:  # the first step makes the states
            with waiting_is_an_error():
                step_unless(optimizer, flag)
        else:
            step_unless(optimizer, flag)


@pytest.mark.parametrize("kind", ["adamw_8bit", "adamw_bnb_32bit", "lion_8bit"])
def test_step_of_bitsandbytes_does_not_wait_for_the_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = large()
    optimizer = build_optimizer(section(kind), model)
    train(model, optimizer, range(2))
    model(torch.randn(16, 512, device="cuda")).square().mean().backward()

    def wait() -> None:
        raise AssertionError("the step waits")

    monkeypatch.setattr(torch.cuda, "synchronize", wait)  # which the mode does not see
    with waiting_is_an_error():
        optimizer.step()
