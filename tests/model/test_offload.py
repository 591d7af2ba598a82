"""What waits on the host comes back as it was: the same gradients, bit for bit, and at most two inputs are there."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from app.model.activation_checkpointing import HostOffload
from app.model.training_model import TrainingModel
from tests.model.small import batch_of, documents_of, gradients, lora, training_model_of

BATCH = batch_of(documents_of((24, 9, 17)))


def gradient(training_model: TrainingModel, passes: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(7)
    training_model.zero_grad()
    for _ in range(passes):
        training_model(BATCH)[0].backward()
    return gradients(training_model)


@pytest.mark.parametrize(
    ("kind", "adapter"),
    [
        ("llama", None),
        ("gpt2", lora()),
        ("gemma2", lora(dropout=0.3)),
        ("gpt_oss", lora()),
        ("mixtral", None),
    ],
)
def test_gradients_are_the_same_to_the_bit(kind: str, adapter: Any) -> None:
    here, away = (
        gradient(training_model_of(kind, adapter, recompute=True, offload=on), passes=2)
        for on in (False, True)
    )
    assert any(each.any() for each in here.values())
    assert all(torch.equal(away[name], here[name]) for name in here)


class Layers:
    """A stack of layers that notes how many of the inputs that came back are alive."""

    def __init__(self, count: int) -> None:
        self.host = HostOffload()
        self.count = count
        self.back: list[Any] = []
        self.most = 0
        fetched = self.host._to_device

        def noted(away: Any) -> Any:
            found = fetched(away)
            self.back.append(weakref.ref(found[0]))
            self.most = max(self.most, sum(each() is not None for each in self.back))
            return found

        self.host._to_device = noted  # type: ignore[method-assign,assignment]

    def loss(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        for layer in range(self.count):
            with self.host.offload(layer):
                x = checkpoint(lambda given: (given * 1.5).tanh() * given, x, use_reentrant=False)
        return x.sum()


def test_every_input_comes_back_once_and_two_are_there_at_most() -> None:
    layers = Layers(6)
    x = torch.linspace(-1, 1, 2 * 5 * 8).view(2, 5, 8).requires_grad_()
    for _ in range(2):  # a second micro-batch begins anew
        layers.back.clear()
        loss = layers.loss(x)
        assert layers.host.bytes == 6 * x.nbytes
        loss.backward()
        assert len(layers.back) == 6
    assert layers.most == 2
    del loss
    assert all(each() is None for each in layers.back)


def test_a_pass_that_is_never_gone_back_leaves_the_next_one_alone() -> None:
    layers = Layers(3)
    x = torch.linspace(-1, 1, 40).view(1, 5, 8).requires_grad_()
    (expected,) = torch.autograd.grad(layers.loss(x), x)
    kept = layers.loss(x * 2)
    (found,) = torch.autograd.grad(layers.loss(x), x)
    assert torch.equal(found, expected)
    (late,) = torch.autograd.grad(kept, x)
    assert torch.isfinite(late).all()


def test_without_gradients_nothing_goes_away() -> None:
    training_model = training_model_of("llama", recompute=True, offload=True)
    with torch.no_grad():
        assert torch.isfinite(training_model(BATCH)[0])
