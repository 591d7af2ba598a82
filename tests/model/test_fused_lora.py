"""Fused adapter layers, with gradients written by hand, against PEFT's forward and autograd."""

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.config.schema import QuantizationConfig
from app.model import fused_lora
from app.model.fusion import fuse
from app.model.kernels import as_on_gpu, product_in_float32
from app.model.nf4 import fused_forms
from app.model.quantization import Bits4
from app.model.training_model import TrainingModel
from tests.model.small import ALL_KINDS, distance, lora, outcome, training_model_of
from tests.model.test_activation_checkpointing import BATCH, saved_bytes

NF4 = QuantizationConfig(kind="nf4", double_quant=True)
FUSED = {  # of two layers: adapted layers, gated MLPs, groups of the same rows, norms
    "llama": (14, 2, 2, 5),
    "mistral": (14, 2, 2, 5),
    "granite": (14, 2, 2, 5),
    "qwen2": (14, 2, 2, 5),
    "qwen3": (14, 2, 2, 9),
    "gemma2": (14, 2, 2, 9),
    "gemma3_text": (14, 2, 2, 13),
    "olmo2": (14, 2, 2, 9),
    "cohere2": (14, 2, 2, 0),
    "phi3": (8, 0, 0, 5),
    "gpt_oss": (8, 0, 2, 5),
    "mixtral": (8, 0, 2, 5),
    "bert": (12, 0, 2, 0),
    "roberta": (12, 0, 2, 0),
    "modernbert": (8, 0, 0, 0),
    "gpt2": (0, 0, 0, 0),  # has no linear layers but its own
}


def pair(kind: str, precision: str = "fp32", **given: Any) -> tuple[TrainingModel, TrainingModel]:
    """Two models of the same numbers: fused, and as PEFT computes."""
    adapter = given.pop("adapter", {})
    fused, plain = (training_model_of(kind, lora(fused=f, **adapter), precision, **given) for f in (True, False))
    return fused, plain


@pytest.mark.parametrize("kind", sorted(ALL_KINDS))
def test_fuse_kind_fuses_known_parts(kind: str) -> None:
    fused, plain = pair(kind)
    found = fused.fused
    assert (found.linear, found.gated, found.shared, found.norms) == FUSED[kind]
    assert all(proof.passed for proof in found.comparisons)
    assert fused.remarks() == []
    assert list(fused.network.state_dict()) == list(plain.network.state_dict())
    assert plain.fused.linear == plain.fused.gated == 0


@pytest.mark.parametrize(("kind", "name"), [("qwen2", "self_attn.q_proj"), ("gemma2", "mlp")])
def test_fused_bf16_as_near_to_fp32_as_peft(kind: str, name: str) -> None:
    """Each part by itself: in a whole model chance decides. Qwen 2 has biases, Gemma 2 another activation."""
    truth, fused, plain = (
        training_model_of(kind, lora(fused=which == "fused"), precision)
        for which, precision in (("truth", "fp32"), ("fused", "bf16"), ("plain", "bf16"))
    )
    with torch.no_grad():
        for exact, rounded in zip(truth.parameters(), plain.parameters(), strict=True):
            exact.copy_(rounded)
    expected = on_rows(truth, name)
    for ours, theirs, its in zip(on_rows(fused, name), on_rows(plain, name), expected, strict=True):
        assert 0 < distance(ours, its) <= 1.3 * distance(theirs, its), "an average would be 1"


def on_rows(training_model: TrainingModel, name: str) -> list[Tensor]:
    """Output of a part of the first layer for many rows, and all gradients."""
    module = training_model.language_model.base_model.get_submodule(f"layers.0.{name}")
    generator = torch.Generator().manual_seed(1)
    trained = [p for p in module.parameters() if p.requires_grad]
    like = trained[0]  # an A; that of the gate has the inputs of the MLP
    leaf = torch.randn(1, 512, like.shape[1], generator=generator).bfloat16().requires_grad_()
    with training_model.autocast(leaf.device):
        out = module(leaf if training_model.compute else leaf.float())
    given = torch.randn(out.shape, generator=generator).bfloat16()
    return [out.detach(), *torch.autograd.grad(out, [leaf, *trained], given.to(out.dtype))]


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["k_proj"], ["v_proj", "o_proj", "up_proj"]])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_fused_some_targets_equal_peft(targets: list[str], recompute: bool) -> None:
    fused, plain = pair("llama", adapter={"targets": targets}, recompute=recompute)
    assert fused.fused.linear == 2 * len(targets)
    assert fused.fused.shared == (2 if len(targets) == 2 else 0)
    assert distance(outcome(fused, BATCH)[1], outcome(plain, BATCH)[1]) <= 1e-5


@pytest.mark.parametrize("quantization", [None, NF4], ids=["dense", "nf4"])
def test_fused_saves_less_than_peft(quantization: QuantizationConfig | None) -> None:
    given = {} if quantization is None else {"quantization": quantization}
    fused, plain = (saved_bytes(each) for each in pair("llama", "bf16", **given))
    assert fused < 0.7 * plain


@pytest.mark.parametrize(("kind", "precision"), [("llama", "fp32"), ("qwen2", "bf16")])
def test_fused_nf4_with_buffer_equals_without(kind: str, precision: str) -> None:
    plain = training_model_of(kind, lora(), precision, quantization=NF4)
    with as_on_gpu():
        buffered = training_model_of(kind, lora(), precision, quantization=NF4)
    assert buffered.remarks() == []
    assert buffered.fused.linear == plain.fused.linear
    (loss, found), (wanted_loss, wanted) = outcome(buffered, BATCH), outcome(plain, BATCH)
    assert loss == pytest.approx(wanted_loss, rel=1e-6 if precision == "fp32" else 1e-3)
    assert distance(found, wanted) <= (1e-6 if precision == "fp32" else 1e-2)


def test_fuse_dropout_is_left_to_peft() -> None:
    found = training_model_of("llama", lora(dropout=0.1)).fused
    assert (found.linear, found.gated) == (0, 0)


def test_fused_disabled_is_base_and_merged_counts_once() -> None:
    fused, plain = pair("llama")
    with torch.no_grad():
        tuned = float(fused(BATCH)[0])
        with fused.network.disable_adapter(), plain.network.disable_adapter():  # type: ignore[operator]
            base = float(fused(BATCH)[0])
            assert base == float(plain(BATCH)[0])
        assert abs(tuned - base) > 1
        assert float(fused(BATCH)[0]) == tuned
        fused.network.merge_adapter()  # type: ignore[operator]
        assert float(fused(BATCH)[0]) == pytest.approx(tuned, rel=1e-5)


def test_fused_reads_parameters_replaced_later() -> None:
    fused, plain = pair("llama")
    for training_model in (fused, plain):
        for module in training_model.network.modules():
            for part in ("lora_A", "lora_B"):
                if hasattr(module, part) and "default" in getattr(module, part):
                    layer = getattr(module, part)["default"]
                    layer.weight = nn.Parameter(2 * layer.weight.detach())
    ours, theirs = outcome(fused, BATCH), outcome(plain, BATCH)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert distance(ours[1], theirs[1]) <= 1e-5
    assert all(bool(each.any()) for each in ours[1].values())


def test_fuse_comparison_leaves_weights_and_random_state() -> None:
    fused, plain = pair("llama")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        fuse(plain.network, lambda: plain.autocast(torch.device("cpu")))
        drawn = torch.rand(1)
        torch.manual_seed(5)
        assert torch.equal(drawn, torch.rand(1))
    assert all(torch.equal(a, b) for a, b in zip(fused.parameters(), plain.parameters(), strict=True))
    assert all(p.grad is None for p in plain.parameters())


def test_fuse_other_mlp_is_left_alone() -> None:
    plain = training_model_of("llama", lora(fused=False))
    for module in plain.network.modules():
        if type(module).__name__ == "LlamaMLP":
            module.forward = _with_more(module)
    expected = outcome(plain, BATCH)
    found = fuse(plain.network, lambda: plain.autocast(torch.device("cpu")))
    assert (found.linear, found.gated, found.shared) == (14, 0, 4), "gate and up are together still"
    assert [proof.passed for proof in found.comparisons].count(False) == 1
    (remark,) = found.remarks()
    assert "so these layers are computed as the model and PEFT do" in remark
    again = outcome(plain, BATCH)
    assert again[0] == pytest.approx(expected[0], rel=1e-6)
    assert distance(again[1], expected[1]) <= 1e-6


def _with_more(mlp: Any) -> Any:
    return lambda x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x).clamp(-0.02, 0.02))


@pytest.mark.parametrize(
    ("part", "precision", "spoilt"),
    [
        ("forward", "fp32", 1.1),
        ("of_x", "bf16", 1.1),
        ("of_a", "fp32", 1.1),
        ("of_b", "bf16", 1.1),
        ("of_a", "bf16", math.nan),
    ],
)
def test_fuse_wrong_pass_is_not_installed(
    part: str, precision: str, spoilt: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_products, real_gradients = fused_lora.products, fused_lora.gradients

    def products(rows: Tensor, loras: Any) -> tuple[list[Tensor], Tensor]:
        outs, inner = real_products(rows, loras)
        return [out * (spoilt if part == "forward" else 1) for out in outs], inner

    def wrong(*given: Any, of_rows: bool) -> tuple[Tensor | None, list[Any]]:
        of_x, halves = real_gradients(*given, of_rows=of_rows)
        if of_x is not None and part == "of_x":
            of_x = of_x * spoilt
        of_a, of_b = (spoilt if part == each else 1 for each in ("of_a", "of_b"))
        return of_x, [(of_a * a, of_b * b) for a, b in halves if a is not None and b is not None]

    monkeypatch.setattr(fused_lora, "products", products)
    monkeypatch.setattr(fused_lora, "gradients", wrong)
    found = training_model_of("llama", lora(), precision).fused
    assert (found.linear, found.gated, found.shared) == (0, 0, 0)
    assert not any(proof.passed for proof in found.comparisons if "Norm" not in proof.what)


def test_fuse_trained_base_is_left_alone() -> None:
    plain = training_model_of("llama", lora(fused=False))
    for module in plain.network.modules():
        if isinstance(module, nn.Linear):
            module.weight.requires_grad_()
    assert fuse(plain.network, None).linear == 0


class Attention(nn.Module):
    """Three adapted layers in any order of calls."""

    def __init__(self, calls: Any) -> None:
        super().__init__()
        adapted = training_model_of("llama", lora(fused=False)).language_model.base_model.layers[0].self_attn
        self.q_proj, self.k_proj, self.v_proj = adapted.q_proj, adapted.k_proj, adapted.v_proj
        self.calls = calls

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return torch.cat(self.calls(self.q_proj, self.k_proj, self.v_proj, x, other), dim=-1)


class Network(nn.Module):
    def __init__(self, calls: Any) -> None:
        super().__init__()
        self.attention = Attention(calls)


def _without_gradient(layer: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = layer(x)
    return result


CALLS: dict[str, Callable[..., list[Tensor]]] = {
    "in order": lambda q, k, v, x, _other: [q(x), k(x), v(x)],
    "in another": lambda q, k, v, x, _other: [v(x), q(x), k(x)],
    "two of them": lambda q, _k, v, x, _other: [q(x), v(x)],
    "one twice": lambda q, k, v, x, _other: [q(x), q(x), k(x), v(x)],
    "other rows": lambda q, k, v, x, other: [q(x), k(other), v(other)],
    "equal rows": lambda q, k, v, x, _other: [q(x), k(x.clone()), v(x.view_as(x))],
    "rows that change": lambda q, k, v, x, _other: [q(x), k(x.mul_(2)), v(x)],
    "without gradient": lambda q, k, v, x, _other: [_without_gradient(q, x), k(x), v(x)],
    "one output unused": lambda q, k, v, x, _other: [q(x), k(x), v(x)][:2],
}


def network_outcome(network: Network) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    leaf, other = (torch.randn(2, 5, 32, generator=generator).requires_grad_() for _ in range(2))
    out = network.attention(leaf * 1, other * 1)
    trained = [p for p in network.attention.parameters() if p.requires_grad]
    found = torch.autograd.grad(out.cos().sum(), [leaf, other, *trained], allow_unused=True)
    return [out.detach(), *(torch.zeros(1) if each is None else each for each in found)]


@pytest.mark.parametrize("how", CALLS)
def test_shared_outputs_any_calls_equal_peft(how: str) -> None:
    network = Network(CALLS[how])
    if how == "rows that change":  # PEFT's own forward keeps them for its backward pass, and refuses
        with torch.no_grad():
            expected = [network.attention(torch.ones(2, 5, 32), None)]
    else:
        expected = network_outcome(network)
    assert fuse(network, None).shared == 1
    if how == "rows that change":
        with torch.no_grad():
            found = [network.attention(torch.ones(2, 5, 32), None)]
    else:
        found = network_outcome(network)
    for ours, own in zip(found, expected, strict=True):
        assert distance(ours + 1, own + 1) <= 1e-6


def fails(q: Any, _k: Any, _v: Any, x: Tensor, _other: Tensor) -> list[Tensor]:
    q(x)
    raise ValueError


@pytest.mark.parametrize("calls", [CALLS["two of them"], fails])
def test_shared_outputs_freed_after_forward(calls: Any) -> None:
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


def test_sums_over_rows_are_not_rounded_on_a_gpu() -> None:
    """Gradients of A and B are float32; as sums of 16 bits they would be numbers of 16 bits."""
    with as_on_gpu():
        found = outcome(training_model_of("llama", lora(), "bf16"), BATCH)[1]
        rounded = [name for name, each in found.items() if torch.equal(each, each.bfloat16().float()) and each.any()]
        assert rounded == []
    on_cpu = outcome(training_model_of("llama", lora(), "bf16"), BATCH)[1]
    assert distance(found, on_cpu) < 0.02


def test_product_in_float32_equals_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((8, 4096), (4096, 24)))
    found = product_in_float32(left, right)
    assert found.dtype == torch.float32
    assert distance(found, left.double() @ right.double()) < 1e-6


def test_few_rows_of_four_bits_go_through_bitsandbytes() -> None:
    layer: Any = Bits4("nf4", double_quant=True, compute=torch.float32).quantized(nn.Linear(64, 32, bias=False))
    with as_on_gpu():
        (form,) = fused_forms(nn.ModuleList([layer])).values()
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    assert form.buffer is not None
    with torch.no_grad():
        few = form.product(rows[:4])
        assert form.buffer._buffers == {}, "no weight was dequantised"
        assert distance(few, form.product(rows)[:4]) < 1e-5
    assert form.buffer._buffers != {}
