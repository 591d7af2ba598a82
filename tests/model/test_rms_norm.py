"""Norms that save only their input, against the model's own; layers that recompute a norm's output."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.model.fusion import fuse
from app.model.rms_norm import RmsNorm, rms_norm_of
from app.model.training_model import TrainingModel
from tests.choices import taking_turns
from tests.model.small import distance, full, gradients, lora, training_model_of
from tests.model.test_activation_checkpointing import BATCH

# rounds before it weighs; rounds after; multiplies by 1 + weight; over the numbers of a head
NORMS = {"llama": "norm", "olmo2": "norm", "gemma2": "norm", "qwen3": "layers.0.self_attn.q_norm"}


def norm_of(kind: str) -> Any:
    module: Any = training_model_of(kind).language_model.base_model.get_submodule(NORMS[kind])
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(module.weight.shape, generator=generator)
    module.weight.data = weight.to(module.weight.dtype)
    return module


def ours(module: Any) -> Any:
    found = rms_norm_of(module)
    assert found is not None
    return lambda x: found(x, module.weight)


def outcome(forward: Any, module: Any, x: Tensor) -> list[Tensor]:
    """Output and gradients of rows and weight."""
    leaf = x.detach().clone().requires_grad_()
    out = forward(leaf)
    given = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out.detach(), *torch.autograd.grad(out, [leaf, module.weight], given.to(out.dtype))]


def rows(module: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 256, module.weight.shape[0], generator=generator) + 0.2


@pytest.mark.parametrize("kind", NORMS)
def test_rms_norm_fp32_equals_models_own(kind: str) -> None:
    module = norm_of(kind)
    for found, expected in zip(
        outcome(ours(module), module, rows(module)), outcome(module, module, rows(module)), strict=True
    ):
        assert distance(found, expected) <= 1e-6


@pytest.mark.parametrize(("kind", "weight"), taking_turns(tuple(NORMS), (torch.bfloat16, torch.float32)))
def test_rms_norm_bf16_as_near_to_float64_as_own(kind: str, weight: torch.dtype) -> None:
    module = norm_of(kind).to(weight)
    x = rows(module).bfloat16()
    expected = outcome(*in_float64(module), x.double())
    for found, own, truth in zip(outcome(ours(module), module, x), outcome(module, module, x), expected, strict=True):
        assert found.dtype == own.dtype
        assert distance(found, truth) <= 1.1 * distance(own, truth) + 1e-9


def in_float64(module: Any) -> tuple[Any, Any]:
    """The definition in float64, and its module; kinds differ in what they multiply by."""
    exact = copy.deepcopy(module).double()
    more = 1.0 if "Gemma" in type(module).__name__ else 0.0
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return lambda x: x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (exact.weight + more), exact


class Centred(nn.Module):
    """Subtracts the mean first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class WithGate(Centred):
    """Takes more than rows."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * gate


@pytest.mark.parametrize("module", [Centred(), WithGate(), nn.LayerNorm(8), nn.LayerNorm(8, bias=False)])
def test_rms_norm_of_other_module_is_none(module: nn.Module) -> None:
    assert rms_norm_of(module) is None
    own = module.forward
    assert fuse(module, None).norms == 0
    assert module.forward == own


class Doubled(nn.RMSNorm):
    """Multiplied by an attribute."""

    def __init__(self, by: float) -> None:
        super().__init__(8, eps=1e-5)
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.by


def test_fuse_norms_of_one_class_each_by_its_settings() -> None:
    assert fuse(nn.ModuleList([Doubled(1.0), Doubled(2.0), Doubled(1.0)]), None).norms == 2


@pytest.mark.parametrize(("part", "precision"), [("output", "fp32"), ("input_gradient", "bf16")])
def test_fuse_wrong_norm_is_not_installed(part: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(RmsNorm, part)
    monkeypatch.setattr(RmsNorm, part, lambda *given: real(*given) * 1.1)
    assert training_model_of("llama", lora(), precision).fused.norms == 0


def saved_by(training_model: TrainingModel) -> tuple[set[int], list[int]]:
    """Addresses of tensors saved for the backward pass, and of the norms' outputs in order."""
    kept: dict[int, Tensor] = {}
    outputs: list[Tensor] = []  # alive, so that an address means one tensor
    hooks = [
        module.register_forward_hook(lambda _module, _given, out: outputs.append(out))
        for module in training_model.network.modules()
        if "Norm" in type(module).__name__
    ]

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        training_model(BATCH)
    for hook in hooks:
        hook.remove()
    return set(kept), [out.data_ptr() for out in outputs]


@pytest.mark.parametrize(("kind", "precision"), [("llama", "fp32"), ("gemma2", "bf16")])
def test_norm_output_is_not_saved_by_layers(kind: str, precision: str) -> None:
    """Except for the first norm: nothing else saves its input."""
    kept, outputs = saved_by(training_model_of(kind, lora(), precision))
    before_a_layer = outputs[:-1]  # and before the head
    assert [place for place, each in enumerate(before_a_layer) if each in kept] == [0]
    kept, outputs = saved_by(training_model_of(kind, lora(fused=False), precision))
    assert precision == "bf16" or kept.intersection(outputs[1:-1]), "in 16 bits PEFT keeps copies of them"


@pytest.mark.parametrize(("kind", "adapter"), [("llama", full), ("gemma2", lora)])
def test_trained_norm_gets_gradient(kind: str, adapter: Any) -> None:
    results = []
    for fused in (True, False):
        training_model = training_model_of(kind, adapter() if adapter is full else lora(fused=fused))
        for name, parameter in training_model.network.named_parameters():
            parameter.requires_grad_(parameter.requires_grad or "norm" in name)
        if adapter is full and fused:
            assert fuse(training_model.network, partial(training_model.autocast, torch.device("cpu"))).norms
        loss = training_model(BATCH)[0]
        loss.backward()
        results.append((float(loss.detach()), gradients(training_model)))
    (loss, found), (expected_loss, expected) = results
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for name in expected:
        assert distance(found[name], expected[name]) <= 2e-5, name


def test_norm_output_changed_in_place_is_saved() -> None:
    results = []
    for fused in (True, False):
        training_model = training_model_of("llama", lora(fused=fused))
        for module in training_model.network.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.register_forward_hook(lambda _module, _given, out: out.mul_(1.5))
        training_model(BATCH)[0].backward()
        results.append(gradients(training_model))
    assert distance(*results) <= 1e-5
