"""Layers whose weights come as they are needed: the same numbers to the bit, and no more of them there than two."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from app.config.schema import QuantizationConfig
from app.model import lending as rooms
from app.model.build import build_trainee
from app.model.dealing import deal, held_by
from app.model.flow import lowest_reached
from app.model.lending import Lending
from app.model.recompute import repeated_layers
from app.model.trainee import Trainee
from tests.model.small import (
    KINDS,
    batch_of,
    documents_of,
    full,
    gradients,
    lora,
    model_config,
    numbers,
    sections,
    trainee_of,
    wide_numbers,
)

BATCH = batch_of(documents_of((24, 9, 17)))
NF4 = QuantizationConfig(kind="nf4", double_quant=True)


class _Done:
    def wait(self) -> None:
        """At once."""


@dataclass
class Sent:
    """From processes that have the very weights of `source`. What was sent is written down, and what was here then."""

    source: dict[int, Tensor] = field(default_factory=dict)  # by the address of the storage that it goes to
    sent: list[tuple[int, tuple[int, ...], int]] = field(default_factory=list)  # which, its shape, of whom
    told: list[float] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)  # of the others

    def broadcast(self, tensor: Tensor, of: int) -> Any:
        address = tensor.untyped_storage()._cdata
        self.sent.append((list(self.source).index(address), tuple(tensor.shape), of))
        tensor.copy_(self.source[address].as_strided(tensor.shape, (1,)))
        return _Done()

    def highest(self, value: float) -> float:
        self.told.append(value)
        return max(value, self.answers.pop(0)) if self.answers else value


def every_tensor(network: nn.Module) -> list[Tensor]:
    """Of the base, adapters left out, in an order of its own."""
    lm: Any = network
    lm = lm.get_base_model() if hasattr(lm, "get_base_model") else lm
    return [each for name, part in lm.named_modules() if ".lora_" not in f".{name}" for each in held_by(part)]


@pytest.fixture(autouse=True)
def _everything_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "LEAST_BYTES", 1)


def lent(
    kind: str, rank: int, processes: int = 2, adapter: Any = None, layers: int = 2, **given: Any
) -> tuple[Trainee, Sent, Trainee]:
    """Of one process, what it is sent, and the same in one piece."""
    wire = Sent()
    trained = adapter is None
    lending = Lending(wire, rank, processes, trained=trained)
    architecture = (wide_numbers if given.get("quantization") else numbers)(kind, num_hidden_layers=layers)
    model = model_config(kind, architecture=architecture)
    whole = trainee_of(kind, adapter, model=model, **given)
    parts = sections(model, adapter or full(), **given)
    _learn(wire, lending, whole)
    made = build_trainee(parts, torch.device("cpu"), seed=0, base_path="base", lending=lending)
    with torch.no_grad():
        for mine, theirs in zip(adapters(made), adapters(whole), strict=True):
            mine.copy_(theirs)
    return made, wire, whole


def adapters(trainee: Trainee) -> list[nn.Parameter]:
    return [each for name, each in trainee.network.named_parameters() if ".lora_" in name]


def _learn(wire: Sent, lending: Lending, whole: Trainee) -> None:
    """As soon as it is settled: fusing computes with the weights already."""
    settle = lending.settle

    def settled(lm: nn.Module) -> None:
        settle(lm)
        for mine, theirs in zip(every_tensor(lm), every_tensor(whole.network), strict=True):
            wire.source[mine.untyped_storage()._cdata] = theirs

    lending.settle = settled  # type: ignore[method-assign]


def away(trainee: Trainee) -> int:
    return sum(
        each.numel() > 0 and not each.untyped_storage().nbytes() for each in every_tensor(trainee.network)
    )


def step(trainee: Trainee) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(7)
    trainee.zero_grad()
    loss, _ = trainee(BATCH)
    loss.backward()
    return loss.detach(), gradients(trainee)


def same(found: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert found[0].equal(wanted[0])
    assert found[1].keys() == wanted[1].keys()
    assert all(found[1][name].equal(wanted[1][name]) for name in wanted[1])
    assert any(each.any() for each in wanted[1].values())


@pytest.mark.parametrize("recompute", [False, 1, True])
@pytest.mark.parametrize("adapter", [None, lora()], ids=["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_the_same_to_the_bit_and_leaves_nothing_behind(
    kind: str, adapter: Any, recompute: bool | int
) -> None:
    borrowed, _, whole = lent(kind, 1, adapter=adapter, recompute=recompute)
    before = away(borrowed)
    assert before > len(repeated_layers(borrowed.language_model))
    for _ in range(2):
        same(step(borrowed), step(whole))
        assert away(borrowed) == before
    for mine, theirs in zip(borrowed.eval().scores(BATCH), whole.eval().scores(BATCH), strict=True):
        assert mine.equal(theirs)
    assert away(borrowed) == before


@pytest.mark.parametrize("quantization", [NF4, QuantizationConfig(kind="fp8")], ids=["nf4", "fp8"])
@pytest.mark.parametrize("recompute", [False, True])
def test_packed_weights_come_with_what_unpacks_them(quantization: Any, recompute: bool) -> None:
    borrowed, wire, whole = lent("llama", 1, adapter=lora(), quantization=quantization, recompute=recompute)
    same(step(borrowed), step(whole))
    weights = {each.untyped_storage()._cdata for each in borrowed.parameters()}
    sent = {list(wire.source)[which] for which, _, _ in wire.sent}
    assert sent - weights, "scales are sent too"
    assert sent & weights


def test_dropout_draws_as_it_would() -> None:
    borrowed, _, whole = lent("llama", 0, adapter=lora(dropout=0.3), recompute=True)
    same(step(borrowed), step(whole))


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("adapter", [None, lora()], ids=["full", "lora"])
def test_every_process_sends_in_one_order_whether_it_computes_or_serves(adapter: Any, processes: int) -> None:
    orders, passes = [], []
    for rank in range(processes):
        borrowed, wire, _ = lent("llama", rank, processes, adapter, recompute=1)
        for work in (
            step,
            lambda trainee: trainee.eval().scores(BATCH),
            lambda trainee: trainee.lending.serve(backward=True),
            lambda trainee: trainee.lending.serve(),
        ):
            wire.sent.clear()
            work(borrowed)
            passes.append([*wire.sent])
        orders.append(passes[-4:])
    assert all(order == orders[0] for order in orders)
    assert orders[0][0] == orders[0][2], "a step"
    assert orders[0][1] == orders[0][3], "an evaluation"
    assert {of for _, _, of in orders[0][0]} == set(range(processes))


def test_a_backward_pass_ends_where_nothing_below_is_trained() -> None:
    adapter = lora(targets=["model.layers.2.mlp.up_proj", "model.layers.3.mlp.up_proj"])
    borrowed, wire, _ = lent("llama", 0, adapter=adapter, layers=5)
    assert borrowed.lending is not None
    lowest = lowest_reached(borrowed.language_model)
    assert lowest == 2
    wire.sent.clear()
    step(borrowed)
    made = [*wire.sent]
    wire.sent.clear()
    borrowed.lending.serve(backward=True, lowest=lowest)
    assert wire.sent == made
    whole, _, _ = lent("llama", 0)
    assert lowest_reached(whole.language_model) == 0, "an embedding is trained before any layer"


def test_all_others_follow_passes_that_one_leads() -> None:
    borrowed, leads, _ = lent("llama", 0)
    assert borrowed.lending is not None
    with borrowed.lending.led():
        for _ in range(3):
            borrowed.predicted(BATCH.ids[0])
    assert leads.told == [1, 1, 1, 0]
    served, follows, _ = lent("llama", 1)
    assert served.lending is not None
    follows.answers = [1, 1, 1, 0]
    del leads.sent[:-1], follows.sent[:]
    with borrowed.lending.led():
        leads.sent.clear()
        for _ in range(3):
            borrowed.predicted(BATCH.ids[0])
    served.lending.follow()
    assert follows.sent == leads.sent != []


@pytest.mark.parametrize("backward", [False, True])
def test_no_more_than_two_layers_are_here(backward: bool) -> None:
    borrowed, _, _ = lent("llama", 1, layers=6)
    lm = borrowed.language_model
    here: list[int] = []
    watched = [
        [each for part in layer.modules() for each in held_by(part) if not each.untyped_storage().nbytes()]
        for layer in repeated_layers(lm)
    ]

    def look(*_given: Any) -> None:
        here.append(
            sum(any(each.untyped_storage().nbytes() for each in each_layer) for each_layer in watched)
        )

    for layer in repeated_layers(lm):
        layer.mlp.register_forward_hook(look)
        layer.mlp.register_full_backward_hook(look)
    if backward:
        step(borrowed)
    else:
        borrowed.eval().scores(BATCH)
    assert max(here) == 2
    assert len(here) >= 6 * (1 + backward)


def test_after_a_backward_pass_that_failed_midway_all_is_as_before() -> None:
    borrowed, _, whole = lent("llama", 1, layers=4)
    before = away(borrowed)
    layer = repeated_layers(borrowed.language_model)[1]

    def fails(*_given: Any) -> None:
        raise RuntimeError("midway")

    hook = layer.mlp.register_full_backward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="midway"):
        step(borrowed)
    hook.remove()
    same(step(borrowed), step(whole))
    assert away(borrowed) == before


def test_a_piece_of_what_others_have_too_stays() -> None:
    for rank in (0, 1):
        lending = Lending(Sent(), rank, 2, trained=True)
        lm = trainee_of("llama").language_model
        layer = repeated_layers(lm)[0].self_attn.q_proj
        layer.register_buffer("some", torch.ones(100)[:50])
        lending.settle(lm)
        assert bool(layer.weight.untyped_storage().nbytes()) == (lending.owner_of(layer.weight) == rank)
        assert layer.some.untyped_storage().nbytes() == 400


def test_the_state_of_all_comes_to_the_first_on_its_host() -> None:
    borrowed, _, whole = lent("gemma2", 0)
    assert borrowed.lending is not None
    state, wanted = borrowed.lending.state_on_host(borrowed.language_model), whole.language_model.state_dict()
    assert list(state) == list(wanted)
    assert all(state[name].equal(wanted[name]) for name in wanted)
    assert away(borrowed) > 0
    other, _, _ = lent("gemma2", 1)
    assert other.lending is not None
    assert other.lending.state_on_host(other.language_model) == {}


def test_who_keeps_what_is_known_of_each_weight() -> None:
    borrowed, _, _ = lent("llama", 1, 3)
    lending = borrowed.lending
    assert lending is not None
    for name, weight in borrowed.trained().items():
        assert lending.is_lent(weight) == ("layers." in name), name
        owner = lending.owner_of(weight)
        assert owner is not None, "also of what lies outside of layers, since it is trained"
        is_here = weight.untyped_storage().nbytes() > 0
        assert is_here == (owner == 1 or not lending.is_lent(weight)), name
    adapted, _, _ = lent("llama", 1, 3, lora())
    assert adapted.lending is not None
    assert {adapted.lending.owner_of(each) for each in adapters(adapted)} == {None}


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 9))
def test_it_is_dealt_as_evenly_as_the_largest_piece_allows(sizes: list[int], processes: int) -> None:
    owners = deal(dict(enumerate(sizes)), processes)
    loads = [sum(size for at, size in enumerate(sizes) if owners[at] == rank) for rank in range(processes)]
    assert max(loads) - min(loads) <= max(sizes)
    assert owners == deal(dict(enumerate(sizes)), processes)
