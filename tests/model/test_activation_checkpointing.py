"""Recomputed layers and offloaded inputs: gradients, bytes saved, inputs on the device."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from app.errors import ConfigError
from app.layers.activation_checkpointing import HostOffload, recompute, require_layers
from app.model.training_model import TrainingModel
from tests.model.small import batch_of, built, distance, documents_of, gradients, lora, model_config, training_model_of

BATCH = batch_of(documents_of((24, 9, 17)))


def gradient(training_model: TrainingModel, passes: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(7)  # dropout draws the same in both
    training_model.zero_grad()
    for _ in range(passes):
        training_model(BATCH)[0].backward()
    return gradients(training_model)


@pytest.mark.parametrize(
    ("kind", "adapter", "precision"),
    [
        ("llama", lora(dropout=0.3), "fp32"),
        ("gemma3_text", None, "fp32"),
        ("mixtral", lora(), "fp32"),
        ("llama", lora(), "bf16"),
    ],
)
def test_recompute_gradients_equal_stored(kind: str, adapter: Any, precision: str) -> None:
    stored = gradient(training_model_of(kind, adapter, precision))
    again = gradient(training_model_of(kind, adapter, precision, recompute=True))
    assert distance(again, stored) <= (1e-7 if precision == "fp32" else 1e-6)
    assert any(g.any() for g in stored.values())


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_recompute_counts_layers(kind: str) -> None:
    lm = built(kind)
    assert [recompute(lm, wanted) for wanted in (False, 0, 1, 2, True)] == [0, 0, 1, 2, 2]


def test_recompute_more_layers_than_model_has_is_refused() -> None:
    require_layers(built("llama"), 2)
    with pytest.raises(ConfigError, match=r"training\.recompute=3: this model has 2 layers\. Set 0 to 2"):
        require_layers(built("llama"), 3)


def saved_bytes(training_model: TrainingModel) -> int:
    """Bytes that the forward pass saves for backward, without weights."""
    weights = {p.untyped_storage().data_ptr() for p in training_model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        training_model(BATCH)
    return sum(kept.values())


@pytest.mark.parametrize("adapter", [None, lora()], ids=["full", "lora"])
def test_recompute_saves_less_for_backward(adapter: Any) -> None:
    kept = saved_bytes(training_model_of("llama", adapter))
    first, all_of_them = (saved_bytes(training_model_of("llama", adapter, recompute=n)) for n in (1, True))
    assert all_of_them < 0.5 * kept
    # not the half: what a first layer computes before its first adapter needs no gradient
    assert 0.35 < (kept - first) / (kept - all_of_them) <= 0.51


@pytest.mark.parametrize("offload", [False, True])
def test_recompute_without_gradients_is_plain_forward(offload: bool) -> None:
    training_model = training_model_of("llama", recompute=True, offload=offload)
    expected = float(training_model(BATCH)[0].detach())
    with torch.no_grad():
        assert float(training_model(BATCH)[0]) == expected


@pytest.mark.parametrize(("kind", "adapter"), [("mixtral", None), ("gemma2", lora(dropout=0.3))])
def test_offload_gradients_equal_to_the_bit(kind: str, adapter: Any) -> None:
    here, away = (
        gradient(training_model_of(kind, adapter, recompute=True, offload=on), passes=2) for on in (False, True)
    )
    assert any(each.any() for each in here.values())
    assert all(torch.equal(away[name], here[name]) for name in here)


def test_offload_brings_back_one_input_at_a_time() -> None:
    host, alive, most = HostOffload(), [], 0
    x = torch.linspace(-1, 1, 2 * 5 * 8).view(2, 5, 8).requires_grad_()

    def layer(given: Tensor) -> Tensor:
        nonlocal most
        if torch._C._current_graph_task_id() >= 0:  # in the backward pass
            alive.append(weakref.ref(given))
            most = max(most, sum(each() is not None for each in alive))
        return (given * 1.5).tanh() * given

    def loss_of(leaf: Tensor) -> Tensor:
        out = leaf
        for number in range(6):
            with host.offload(number):
                out = checkpoint(layer, out, use_reentrant=False)
        return out.sum()

    (expected,) = torch.autograd.grad(loss_of(x), x)
    assert host.bytes == 6 * x.nbytes
    assert (len(alive), most) == (6, 1)
    never_gone_back = loss_of(x * 2)
    (found,) = torch.autograd.grad(loss_of(x), x)
    assert torch.equal(found, expected)
    assert torch.isfinite(torch.autograd.grad(never_gone_back, x)[0]).all()


@pytest.mark.parametrize(
    ("kind", "adapter", "numbers", "draws"),
    [
        ("llama", lora(), {}, False),
        ("llama", lora(dropout=0.3), {}, True),
        ("llama", None, {"attention_dropout": 0.1}, True),
        ("gpt2", None, {"resid_pdrop": 0.1}, True),
        ("mixtral", lora(), {"router_jitter_noise": 0.1}, True),
    ],
)
def test_state_of_random_numbers_is_read_where_a_layer_draws_some(
    kind: str, adapter: Any, numbers: dict[str, float], draws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_config(kind)
    model.architecture.update(numbers)
    training_model = training_model_of(kind, adapter, "fp32", model=model, recompute=True)
    reads, read = [], torch.get_rng_state

    def counted() -> Tensor:
        reads.append(1)
        return read()

    monkeypatch.setattr(torch, "get_rng_state", counted)
    training_model(BATCH)[0].backward()
    assert bool(reads) is draws
