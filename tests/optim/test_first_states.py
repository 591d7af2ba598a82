"""States that are made before the first step leave no trace: not in a weight, not in a state, not in a later step."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from app.optim.optimizer_state import allocate_states, drop_states
from tests.optim.small import KINDS, Regression, built, train
from tests.optim.test_optimizer_state import equal


def with_zero_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def bits(model: nn.Module) -> list[torch.Tensor]:
    """What torch.equal would not tell apart: the signs of zeros."""
    return [parameter.detach().clone().view(torch.int32) for parameter in model.parameters()]


def begun(kind: str) -> tuple[Regression, Optimizer]:
    """With zeros of both signs among its weights, and a rate and a decay that would move every other one."""
    model, optimizer = built(kind, weight_decay=0.1, lr=0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[::3] = -0.0
            parameter.view(-1)[1::3] = 0.0
    return model, optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_every_state_is_made_and_no_weight_moves(kind: str) -> None:
    model, optimizer = begun(kind)
    before = bits(model)
    with_zero_gradients(model)
    assert allocate_states(optimizer) == len(before)
    assert all(map(torch.equal, bits(model), before))
    assert set(optimizer.state) == set(model.parameters())
    assert all(any(isinstance(value, torch.Tensor) for value in s.values()) for s in optimizer.state.values())
    assert [group["lr"] for group in optimizer.param_groups] == [0.1] * len(optimizer.param_groups)
    drop_states(optimizer)
    assert not optimizer.state


@pytest.mark.parametrize("kind", KINDS)
def test_they_need_what_a_first_step_makes(kind: str) -> None:
    """As many bytes, or it would not be known whether they fit."""

    def sizes(optimizer: Optimizer) -> list[dict[str, Any]]:
        return [
            {
                name: value.numel() * value.element_size()
                for name, value in state.items()
                if torch.is_tensor(value)
            }
            for state in optimizer.state.values()
        ]

    model, optimizer = begun(kind)
    with_zero_gradients(model)
    allocate_states(optimizer)
    other, really = begun(kind)
    train(other, really, range(1))
    assert sizes(optimizer) == sizes(really)


@pytest.mark.parametrize("kind", KINDS)
def test_later_steps_are_the_same(kind: str) -> None:
    plain_model, plain = begun(kind)
    expected = train(plain_model, plain, range(4))
    model, optimizer = begun(kind)
    with_zero_gradients(model)
    allocate_states(optimizer)
    drop_states(optimizer)
    optimizer.zero_grad()
    assert train(model, optimizer, range(4)) == expected
    assert all(map(torch.equal, bits(model), bits(plain_model)))
    assert equal(optimizer.state_dict(), plain.state_dict())


def test_paged_states_stay_as_they_were_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody gives paged memory back: of states that are dropped the memory would be lost."""
    model, optimizer = begun("paged_adamw_8bit")
    own = optimizer.get_state_buffer  # type: ignore[attr-defined]

    def paged(parameter: torch.Tensor, dtype: torch.dtype) -> Any:
        buffer: Any = own(parameter, dtype=dtype)
        buffer.is_paged = parameter.numel() > 4000
        return buffer

    monkeypatch.setattr(optimizer, "get_state_buffer", paged)
    allocate_states(optimizer)
    drop_states(optimizer)
    assert set(optimizer.state) == {model.wide.weight, model.narrow.weight}
    for state in optimizer.state.values():
        assert state["step"] == 0
        assert not any(state[key].any() for key in ("state1", "state2", "absmax1", "absmax2"))
