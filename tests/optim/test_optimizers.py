"""Every optimizer: parameter groups, updates, and weights in bfloat16."""

from copy import deepcopy
from types import MethodType

import pytest
import torch
from bitsandbytes.optim.optimizer import Optimizer8bit
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import LlamaConfig, LlamaForCausalLM

from app.config.conf_files import choices_by_group
from app.optim import optimizers as stochastic_rounding
from app.optim import requirements
from app.optim.optimizer_state import named_states
from app.optim.optimizers import (
    OneByOne,
    Trained,
    build_optimizer,
    ordinary,
    parameter_groups,
    round_into,
    skips_on_device,
    step_unless,
    steps_in_backward,
    trained_parameters,
)
from app.optim.requirements import BITSANDBYTES_KINDS, PAGED_KINDS, check, notes
from app.training.storage_counter import StorageCounter
from tests.optim.small import KINDS, OPTIONS, Regression, built, narrow, regression, section, train
from tests.optim.test_optimizer_state import SKIPPING, equal

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


DEPRECATED_IN_PEFT = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


def llama(*, tied: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_bias=True,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def names(members: list[Trained], **wanted: bool) -> set[str]:
    return {each.name for each in members if all(getattr(each, key) is wanted[key] for key in wanted)}


def test_llama_has_seven_hidden_matrices_and_all_but_embedding_decay() -> None:
    members = trained_parameters(llama())
    hidden = names(members, is_hidden_matrix=True)
    assert len(hidden) == 7
    assert all(name.startswith("model.layers.0.") and name.endswith("proj.weight") for name in hidden)
    assert names(members, decays=True) == hidden | {"lm_head.weight"}


def test_tied_head_does_not_decay() -> None:
    members = trained_parameters(llama(tied=True))
    assert "model.embed_tokens.weight" in names(members, decays=False, is_hidden_matrix=False)
    assert not any(each.name == "lm_head.weight" for each in members)


@DEPRECATED_IN_PEFT
def test_lora_factors_are_trained_and_decay() -> None:
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    members = trained_parameters(model)
    assert len(members) == 14
    assert all("lora_" in each.name and each.decays and each.is_hidden_matrix for each in members)


@DEPRECATED_IN_PEFT
def test_head_trained_by_peft_is_no_hidden_matrix() -> None:
    adapter = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"])
    members = trained_parameters(get_peft_model(llama(), adapter))
    besides = [each for each in members if "lora_" not in each.name]
    assert len(besides) == 2
    assert not any(each.is_hidden_matrix for each in besides)


def test_biases_of_experts_do_not_decay() -> None:
    model = nn.Module()
    model.gate_up = nn.Parameter(torch.zeros(2, 3, 4))
    model.gate_up_bias = nn.Parameter(torch.zeros(2, 4))
    members = trained_parameters(model)
    assert [(each.name, each.decays) for each in members] == [("gate_up", True), ("gate_up_bias", False)]


def test_parameter_groups_cover_everything_once_in_order() -> None:
    members = trained_parameters(regression())
    assert [each.name for each in members] == [name for name, _ in regression().named_parameters()]
    decaying, others = parameter_groups(members, 0.1)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert len(decaying["params"]) + len(others["params"]) == len(members)
    assert parameter_groups([each for each in members if each.decays], 0.1) == [decaying]


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
