"""Layers of the same rows that are computed at once: q, k and v of attention."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.model.fused import fuse
from app.model.fused.shared import Shared
from tests.model.small import distance, gradients, lora, trainee_of
from tests.model.test_fused import on_rows, outcome, pair
from tests.model.test_recompute import BATCH

GROUPS = {"llama": 2, "bert": 2, "gpt_oss": 2, "phi3": 0, "modernbert": 0, "gpt2": 0}  # of two layers


@pytest.mark.parametrize("kind", GROUPS)
def test_groups_are_found_by_looking_on(kind: str) -> None:
    assert trainee_of(kind, lora()).fused.shared == GROUPS[kind]


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["k_proj"], ["v_proj", "o_proj", "up_proj"]])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_only_some_are_adapted(targets: list[str], recompute: bool) -> None:
    fused, plain = (
        trainee_of("llama", lora(fused=f, targets=targets), recompute=recompute) for f in (True, False)
    )
    assert fused.fused.linear == 2 * len(targets)
    assert fused.fused.shared == (2 if len(targets) == 2 else 0)
    assert distance(outcome(fused)[1], outcome(plain)[1]) <= 1e-5


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_bf16_is_as_near_to_the_truth_as_plain_passes(kind: str) -> None:
    results = []
    for which, precision in (("truth", "fp32"), ("fused", "bf16"), ("plain", "bf16")):
        trainee = trainee_of(kind, lora(fused=which == "fused"), precision)
        if which == "truth":
            rounded = trainee_of(kind, lora(fused=False), "bf16")
            for mine, other in zip(trainee.parameters(), rounded.parameters(), strict=True):
                mine.data.copy_(other.data)
        attention = trainee.language_model.base_model.layers[0].self_attn
        attention.o_proj.requires_grad_(False)
        layers = [attention.q_proj, attention.k_proj, attention.v_proj]
        attention.forward = _as_its_parent(attention.forward, layers)
        results.append(on_rows(trainee, "self_attn"))
    for expected, ours, theirs in zip(*results, strict=True):
        assert 0 < distance(ours, expected) <= 1.3 * distance(theirs, expected)


def _as_its_parent(own: Any, layers: list[nn.Module]) -> Any:
    """Inside of what wraps the parent's forward, only the products."""
    cells = own.__closure__ or ()
    shared = [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, Shared)]

    def forward(x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in layers], dim=-1)

    return shared[0].parent(forward) if shared else forward


class Attention(nn.Module):
    """Calls three adapted layers as a test says."""

    def __init__(self, calls: Any) -> None:
        super().__init__()
        adapted = trainee_of("llama", lora(fused=False)).language_model.base_model.layers[0].self_attn
        self.q, self.k, self.v = adapted.q_proj, adapted.k_proj, adapted.v_proj
        self.calls = calls

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return torch.cat(self.calls(self, x, other), dim=-1)


class Network(nn.Module):
    """As much of a model as is looked at."""

    def __init__(self, calls: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 32)
        self.attention = Attention(calls)
        self.seen = in_order  # while it is looked at

    @property
    def base_model(self) -> Any:
        return self._once

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def _once(self, input_ids: Tensor, **_given: Any) -> None:
        asked, self.attention.calls = self.attention.calls, self.seen
        x = self.embedding(input_ids)
        self.attention(x, x + 1)
        self.attention.calls = asked


def in_order(self: Any, x: Tensor, _other: Tensor) -> list[Tensor]:
    return [self.q(x), self.k(x), self.v(x)]


CALLS: dict[str, Any] = {
    "in order": in_order,
    "in another": lambda self, x, _other: [self.v(x), self.q(x), self.k(x)],
    "two of them": lambda self, x, _other: [self.q(x), self.v(x)],
    "one twice": lambda self, x, _other: [self.q(x), self.q(x), self.k(x), self.v(x)],
    "other rows": lambda self, x, other: [self.q(x), self.k(other), self.v(other)],
    "equal rows": lambda self, x, _other: [self.q(x), self.k(x.clone()), self.v(x.view_as(x))],
    "without gradient": lambda self, x, _other: [_without_gradient(self.q, x), self.k(x), self.v(x)],
}


def _without_gradient(layer: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = layer(x)
    return result


def network_outcome(network: Network) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    leaf, other = (torch.randn(2, 5, 32, generator=generator).requires_grad_() for _ in range(2))
    out = network.attention(leaf * 1, other * 1)
    trained = [p for p in network.attention.parameters() if p.requires_grad]
    found = torch.autograd.grad(out.cos().sum(), [leaf, other, *trained], allow_unused=True)
    return [out.detach(), *(torch.zeros(1) if each is None else each for each in found)]


@pytest.mark.parametrize("how", CALLS)
def test_however_they_are_called(how: str) -> None:
    network = Network(CALLS[how])
    expected = network_outcome(network)
    assert fuse(network, None).shared == 1
    for found, own in zip(network_outcome(network), expected, strict=True):
        assert distance(found + 1, own + 1) <= 1e-6


@torch.no_grad()
def test_alone_and_with_rows_that_change() -> None:
    network = Network(lambda self, x, _other: [self.q(x), self.k(x.mul_(2)), self.v(x)])
    x = torch.linspace(-1, 1, 64).view(1, 2, 32)
    expected = [network.attention(x.clone(), x), network.attention.k(x)]
    assert fuse(network, None).shared == 1
    found = [network.attention(x.clone(), x), network.attention.k(x)]
    assert distance(found, expected) <= 1e-6


@pytest.mark.parametrize("how", ["other rows", "one twice"])
def test_what_is_not_called_with_the_same_rows_is_no_group(how: str) -> None:
    network = Network(CALLS[how])
    network.seen = CALLS[how]
    expected = network_outcome(network)
    assert fuse(network, None).shared == 1, "k and v"
    assert distance(network_outcome(network)[0], expected[0]) <= 1e-6


def fails(self: Any, x: Tensor, _other: Tensor) -> list[Tensor]:
    self.q(x)
    raise ValueError


@pytest.mark.parametrize("calls", [CALLS["in order"], CALLS["two of them"], fails])
def test_nothing_outlives_the_forward_pass(calls: Any) -> None:
    network = Network(calls)
    fuse(network, None)
    x = torch.ones(2, 5, 32, requires_grad=True) * 1
    alive = weakref.ref(x)
    try:
        out = network.attention(x, x)
        del out
    except ValueError:
        pass
    del x
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_no_tensor_is_left_after_a_step(recompute: bool) -> None:
    trainee = trainee_of("llama", lora(), recompute=recompute)

    def left() -> int:
        trainee(BATCH)[0].backward()
        trainee.zero_grad()
        gc.collect()
        return sum(issubclass(type(each), Tensor) for each in gc.get_objects())

    first = left()
    assert left() == first


def test_q_k_and_v_keep_one_product_with_all_their_a() -> None:
    """[rows, 3 r], and none of r for each."""
    trainee = trainee_of("llama", lora(r=5))
    shapes: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        trainee(BATCH)
    tokens = BATCH.ids.numel()
    widths = sorted(shape[1] for shape in shapes if shape[:1] == (tokens,) and shape[-1] % 5 == 0)
    assert widths == [5] * 4 + [10] * 2 + [15] * 2  # o and down, gate|up, q|k|v, of two layers


def test_answers_are_the_same_with_a_cache() -> None:
    answers = []
    for trainee in pair("llama"):
        lm = trainee.language_model.eval()
        prompt = torch.arange(3, 9)[None]
        answers.append(lm.generate(prompt, max_new_tokens=8, do_sample=False, use_cache=True))
    assert torch.equal(*answers)


def test_without_sharing_every_layer_is_by_itself() -> None:
    trainee = trainee_of("llama", lora(fused=False))
    expected = outcome(trainee)
    found = fuse(trainee.network, lambda: trainee.arithmetic(torch.device("cpu")), shared=False)
    assert (found.linear, found.gated, found.shared, found.norms) == (14, 2, 0, 5)
    hidden = []
    trainee.language_model.base_model.norm.register_forward_hook(lambda _m, _given, out: hidden.append(out))
    assert distance(outcome(trainee)[1], expected[1]) <= 1e-5
    assert not hasattr(hidden[0], "recipe")


def test_gradients_survive_when_one_output_is_unused() -> None:
    """Nobody computes with zeros for it, and it gets no gradient."""
    trainee = trainee_of("llama", lora())
    attention = trainee.language_model.base_model.layers[0].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    attention.forward = _as_its_parent(attention.forward, layers)
    x = torch.randn(1, 3, 32, requires_grad=True)
    attention(x)[..., :32].sum().backward()
    expected = trainee_of("llama", lora(fused=False)).language_model.base_model.layers[0].self_attn.q_proj
    y = x.detach().clone().requires_grad_()
    expected(y).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert distance(x.grad, y.grad) <= 1e-6
    assert (
        gradients(trainee)[next(n for n in gradients(trainee) if "layers.0" in n and "k_proj.lora_B" in n)]
        .eq(0)
        .all()
    )
