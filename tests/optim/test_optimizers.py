from types import MethodType

import pytest
import torch
from bitsandbytes.optim.optimizer import Optimizer8bit

from app.config.conf_files import choices_by_group
from app.optim import requirements
from app.optim.optimizer_state import named_states
from app.optim.optimizers import build_optimizer, skips_on_device
from app.optim.requirements import BITSANDBYTES_KINDS, PAGED_KINDS, check, notes
from tests.optim.small import KINDS, OPTIONS, built, section, train

PACKAGES = dict.fromkeys(BITSANDBYTES_KINDS, "pip install bitsandbytes") | {"adamw_apex": "needs the package apex"}


@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_lowers_loss_of_regression(kind: str) -> None:
    model, optimizer = built(kind)
    losses = train(model, optimizer, range(60))
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


@pytest.mark.parametrize("kind", KINDS)
def test_weight_decay_shrinks_matrices_only(kind: str) -> None:
    # With zero gradients only the decay is left.
    model, optimizer = built(kind, weight_decay=0.1, lr=0.1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        shrinks = name in {"wide.weight", "narrow.weight", "head.weight"}
        expected = before[name] * 0.99 if shrinks else before[name]
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", sorted(BITSANDBYTES_KINDS))
def test_states_of_8bit_kinds_have_8_bits(kind: str) -> None:
    model, optimizer = built(kind)
    train(model, optimizer, range(1))
    large = optimizer.state[model.wide.weight]["state1"]
    small = optimizer.state[model.narrow.bias]["state1"]
    assert model.wide.weight.numel() == 4096
    assert large.dtype == (torch.float32 if "32bit" in kind else torch.uint8)
    assert small.dtype == torch.float32
    assert large.count_nonzero() > 0


@pytest.mark.parametrize("kind", [kind for kind in OPTIONS if "implementation" in kind])
def test_implementations_step_alike(kind: str) -> None:
    fused, other = built(kind.split()[0], weight_decay=0.01), built(kind, weight_decay=0.01)
    assert train(*other, range(10)) == pytest.approx(train(*fused, range(10)), rel=1e-5)
    assert not skips_on_device(other[1])


def test_adamw_of_bitsandbytes_in_32_bits_steps_as_that_of_torch() -> None:
    kinds = ("adamw", "adamw_bnb_32bit")
    losses, found = (train(*built(kind, weight_decay=0.01, lr=1e-3), range(10)) for kind in kinds)
    assert found == pytest.approx(losses, rel=1e-4)


EMBEDDING_KINDS = [kind for kind in OPTIONS if "embedding_states" in kind]


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("kind", EMBEDDING_KINDS)
def test_embedding_states_of_32_bits_are_of_this_model_alone(kind: str, in_backward: bool) -> None:
    """bitsandbytes' own way, its `GlobalOptimManager`, gives them to every later model of the process."""
    found = []
    for words in (kind.split()[0], kind, kind.split()[0]):
        model, optimizer = built(words, in_backward=in_backward)
        train(model, optimizer, range(1))
        found.append({name: state["state1"].dtype for name, state in named_states(optimizer).items()})
    assert found[1] == found[0] | {"embedding.weight": torch.float32}
    assert found[0]["embedding.weight"] == found[2]["embedding.weight"] == torch.uint8


@pytest.mark.parametrize("kind", [kind for kind in EMBEDDING_KINDS if "adamw" in kind])
def test_embedding_states_of_32_bits_step_as_those_of_torch(kind: str) -> None:
    losses = []
    for words in ("adamw", kind):
        model, _ = built(words)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name == "embedding.weight")
        losses.append(train(model, build_optimizer(section(words, lr=1e-2), model), range(10)))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_muon_steps_hidden_matrices_and_adamw_rest() -> None:
    model, optimizer = built("muon")
    train(model, optimizer, range(1))
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    by_muon = {names[parameter] for parameter, state in optimizer.state.items() if "momentum_buffer" in state}
    by_adamw = {names[parameter] for parameter, state in optimizer.state.items() if "exp_avg" in state}
    assert by_muon == {"wide.weight", "narrow.weight"}
    assert by_adamw == set(names.values()) - by_muon


@pytest.mark.parametrize(("trained", "expected"), [("wide.weight", torch.optim.Muon), ("wide.bias", torch.optim.AdamW)])
def test_muon_of_one_part_is_one_optimizer(trained: str, expected: type) -> None:
    model, _ = built("muon")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == trained)
    assert type(build_optimizer(section("muon"), model)) is expected


def test_muon_moves_matrix_as_far_as_adamw() -> None:
    model, optimizer = built("muon", lr=0.1)
    before = model.narrow.weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    moved = (model.narrow.weight.detach() - before).square().mean().sqrt()
    assert 0.15 < moved / 0.1 < 0.25


@pytest.mark.parametrize("kind", choices_by_group()["optimizer"])
def test_check_without_packages_says_what_to_type(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda _name: None)
    problems = check(section(kind))
    assert len(problems) == (kind in PACKAGES)
    for problem in problems:
        assert f"optimizer={kind}" in problem
        assert PACKAGES[kind] in problem


@pytest.mark.parametrize("kind", KINDS)
def test_notes_on_paged_kinds_on_cpu(kind: str) -> None:
    assert len(notes(section(kind), "cpu")) == (kind in PAGED_KINDS)
    assert notes(section(kind), "cuda") == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.split()[0] in BITSANDBYTES_KINDS])
def test_step_of_bitsandbytes_waits_once_and_for_paged_states_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own step waits for the device after each parameter; the numbers are the same."""
    waits: list[str] = []
    for place in ("bitsandbytes.utils.sync_gpu", "bitsandbytes.optim.optimizer.sync_gpu"):
        monkeypatch.setattr(place, lambda tensor: waits.append(tensor.device.type))
    (model, ours), (twin, theirs) = built(kind, weight_decay=0.01), built(kind, weight_decay=0.01)
    train(model, ours, range(3))
    assert len(waits) == (3 if kind.split()[0] in PAGED_KINDS else 0)
    monkeypatch.setattr(theirs, "step", MethodType(Optimizer8bit.step, theirs))
    waits.clear()
    train(twin, theirs, range(3))
    assert len(waits) > 3
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
