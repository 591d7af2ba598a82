import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import Optimizer

from app.errors import CheckpointError
from app.optim.optimizer_state import allocate_states, drop_states, flatten, load_state, unflatten
from app.optim.optimizers import LR_FACTOR, build_optimizer, skips_on_device, step_unless
from tests.optim.small import KINDS, OPTIONS, Regression, built, narrow, regression, section, train


def equal(a: Any, b: Any) -> bool:
    """To the bit, types of containers and numbers included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def write(optimizer: Optimizer, folder: Path) -> None:
    tensors, plain = flatten(optimizer.state_dict())
    save_file(tensors, folder / "optimizer.safetensors")
    (folder / "optimizer.json").write_text(json.dumps(plain, allow_nan=False))


def read(optimizer: Optimizer, folder: Path) -> None:
    plain = json.loads((folder / "optimizer.json").read_text())
    load_state(optimizer, load_file(folder / "optimizer.safetensors"), plain)


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("optimizer.*"))}


@pytest.mark.parametrize(
    ("make", "kind"), [*((built, kind) for kind in (*KINDS, *OPTIONS)), *((narrow, kind) for kind in KINDS)]
)
def test_continued_from_files_equals_uninterrupted(
    make: Callable[..., tuple[Regression, Optimizer]], kind: str, tmp_path: Path
) -> None:
    whole_model, whole = make(kind, weight_decay=0.01)
    expected = train(whole_model, whole, range(8))

    first_model, first = make(kind, weight_decay=0.01)
    losses = train(first_model, first, range(4))
    first_folder = tmp_path / "first"
    first_folder.mkdir()
    write(first, first_folder)
    written = files(first_folder)

    second_model, second = make(kind, seed=1, weight_decay=0.01)
    train(second_model, second, range(20, 23))
    second_model.load_state_dict(first_model.state_dict())
    read(second, first_folder)
    torch.rand(3)  # draws of dropout do not affect roundings
    losses += train(second_model, second, range(4, 8))

    assert losses == expected
    assert equal(second_model.state_dict(), whole_model.state_dict())
    assert equal(second.state_dict(), whole.state_dict())
    assert files(first_folder) == written, "training on changed the file that it was loaded from"
    write(second, tmp_path)
    after = files(tmp_path)
    write(whole, tmp_path)
    assert files(tmp_path) == after


def test_eight_bit_states_are_saved_as_bytes() -> None:
    model, optimizer = built("adamw_8bit")
    train(model, optimizer, range(1))
    tensors, _ = flatten(optimizer.state_dict())
    assert torch.uint8 in {tensor.dtype for tensor in tensors.values()}


def test_flatten_of_numbers_tuples_and_nested_dictionaries_is_inverted() -> None:
    state = {
        "state": {0: {"step": 3, "inner": {"x": torch.arange(3), 7: None}}, 1: {}},
        "param_groups": [{"betas": (0.9, 0.999), "lr": 0.1 + 0.2, "on": True, "by": {1: "one"}, "params": [0]}],
    }
    tensors, plain = flatten(state)
    assert list(tensors) == ["state/0/inner/x"]
    again = unflatten(tensors, json.loads(json.dumps(plain)))
    assert equal(again, state)


@pytest.mark.parametrize("kind", [*KINDS, *OPTIONS])
def test_factor_of_rate_kept_by_every_kind(kind: str) -> None:
    first, second = (
        build_optimizer(section(kind), regression(), lr_factor=lambda name: 4.0 if "narrow" in name else 1.0)
        for _ in range(2)
    )
    load_state(second, *flatten(first.state_dict()))
    found = {name: group.get(LR_FACTOR) for group in second.param_groups for name in group["param_names"]}
    assert found == {name: 4.0 if "narrow" in name else None for name, _ in regression().named_parameters()}


def test_load_state_of_other_parameters_is_refused() -> None:
    model, optimizer = built("adamw")
    tensors, plain = flatten(optimizer.state_dict())
    model.wide.requires_grad_(False)
    with pytest.raises(CheckpointError, match=r"resume: .*different trained parameters"):
        load_state(build_optimizer(section("adamw"), model), tensors, plain)


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
def test_allocate_states_moves_no_weight(kind: str) -> None:
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


@pytest.mark.parametrize("kind", [*KINDS, *OPTIONS])
def test_allocated_states_have_bytes_of_first_step(kind: str) -> None:
    """As many bytes, or it would not be known whether they fit."""

    def sizes(optimizer: Optimizer) -> list[dict[str, Any]]:
        return [
            {name: value.numel() * value.element_size() for name, value in state.items() if torch.is_tensor(value)}
            for state in optimizer.state.values()
        ]

    model, optimizer = begun(kind)
    with_zero_gradients(model)
    allocate_states(optimizer)
    other, really = begun(kind)
    train(other, really, range(1))
    assert sizes(optimizer) == sizes(really)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_after_allocated_states_are_unchanged(kind: str) -> None:
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


def test_dropped_paged_states_stay_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert set(optimizer.state) == {model.embedding.weight, model.wide.weight, model.narrow.weight}
    for state in optimizer.state.values():
        assert state["step"] == 0
        assert not any(state[key].any() for key in ("state1", "state2", "absmax1", "absmax2"))


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
