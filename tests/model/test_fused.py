"""Adapter layers with gradients written by hand against the forward of PEFT, of which autograd makes the rest."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.config.schema import QuantizationConfig
from app.model.fused import adapted, fuse, gated
from app.model.trainee import Trainee
from tests.model.small import ALL_KINDS, distance, gradients, lora, trainee_of
from tests.model.test_recompute import BATCH, saved_bytes

NF4 = QuantizationConfig(kind="nf4", double_quant=True)
LLAMAS = {"linear": 14, "gated": 2, "shared": 2, "norms": 5}  # of two layers


def pair(kind: str, precision: str = "fp32", **given: Any) -> tuple[Trainee, Trainee]:
    """The same numbers, fused and as PEFT computes."""
    fused, plain = (trainee_of(kind, lora(fused=f), precision, **given) for f in (True, False))
    return fused, plain


def outcome(trainee: Trainee) -> tuple[float, dict[str, Tensor]]:
    trainee.zero_grad()
    loss = trainee(BATCH)[0]
    loss.backward()
    return float(loss.detach()), gradients(trainee)


@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.down_proj", "mlp"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2"])
def test_bf16_is_as_near_to_the_truth_as_plain_passes(kind: str, name: str) -> None:
    """Each part by itself: of a whole model chance decides. Qwen 2 has biases, Gemma 2 another activation."""
    truth, fused, plain = (
        trainee_of(kind, lora(fused=which == "fused"), precision)
        for which, precision in (("truth", "fp32"), ("fused", "bf16"), ("plain", "bf16"))
    )
    with torch.no_grad():
        for exact, rounded in zip(truth.parameters(), plain.parameters(), strict=True):
            exact.copy_(rounded)
    expected = on_rows(truth, name)
    for ours, theirs, its in zip(on_rows(fused, name), on_rows(plain, name), expected, strict=True):
        assert 0 < distance(ours, its) <= 1.3 * distance(theirs, its), "an average would be 1"


def on_rows(trainee: Trainee, name: str) -> list[Tensor]:
    """What a part of the first layer makes of many rows, and all gradients."""
    module = trainee.language_model.base_model.get_submodule(f"layers.0.{name}")
    generator = torch.Generator().manual_seed(1)
    trained = [p for p in module.parameters() if p.requires_grad]
    like = trained[0]  # an A: of a gated MLP that of the gate, whose inputs are the MLP's
    leaf = torch.randn(1, 512, like.shape[1], generator=generator).bfloat16().requires_grad_()
    with trainee.arithmetic(leaf.device):
        out = module(leaf if trainee.compute else leaf.float())
    given = torch.randn(out.shape, generator=generator).bfloat16()
    return [out.detach(), *torch.autograd.grad(out, [leaf, *trained], given.to(out.dtype))]


@pytest.mark.parametrize("kind", sorted(ALL_KINDS))
def test_every_kind_is_fused_where_it_gives_the_same(kind: str) -> None:
    """Whether it is right is asked by the matrix; here, that it happens at all and PEFT's names stay."""
    fused, plain = pair(kind)
    assert fused.fused.linear or kind == "gpt2", "gpt2 has no linear layers but its own"
    assert all(proof.holds for proof in fused.fused.proofs)
    assert list(fused.network.state_dict()) == list(plain.network.state_dict())
    assert plain.fused.linear == plain.fused.gated == 0


def test_a_llama_is_fused_whole() -> None:
    found = trainee_of("llama", lora()).fused
    assert {each: getattr(found, each) for each in LLAMAS} == LLAMAS
    # q and o, k and v, gate and up, down; the MLP; the norms; q, k and v together
    assert len(found.proofs) == 7


@pytest.mark.parametrize("quantization", [None, NF4], ids=["dense", "nf4"])
def test_nothing_else_is_kept_for_backward(quantization: QuantizationConfig | None) -> None:
    given = {} if quantization is None else {"quantization": quantization}
    fused, plain = (saved_bytes(each) for each in pair("llama", "bf16", **given))
    assert fused < 0.7 * plain


def test_dropout_is_left_to_peft() -> None:
    found = trainee_of("llama", lora(dropout=0.1)).fused
    assert (found.linear, found.gated) == (0, 0)


def test_without_the_adapter_it_is_the_base() -> None:
    fused, plain = pair("llama")
    with torch.no_grad():
        tuned = float(fused(BATCH)[0])
        with fused.network.disable_adapter(), plain.network.disable_adapter():  # type: ignore[operator]
            base = float(fused(BATCH)[0])
            assert base == float(plain(BATCH)[0])
        assert abs(tuned - base) > 1
        assert float(fused(BATCH)[0]) == tuned


def test_a_merged_adapter_counts_once() -> None:
    fused, _ = pair("llama")
    with torch.no_grad():
        before = float(fused(BATCH)[0])
        fused.network.merge_adapter()  # type: ignore[operator]
        assert float(fused(BATCH)[0]) == pytest.approx(before, rel=1e-5)


def test_the_proof_leaves_no_trace() -> None:
    fused, plain = pair("llama")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        fuse(plain.network, lambda: plain.arithmetic(torch.device("cpu")))
        drawn = torch.rand(1)
        torch.manual_seed(5)
        assert torch.equal(drawn, torch.rand(1))
    assert all(torch.equal(a, b) for a, b in zip(fused.parameters(), plain.parameters(), strict=True))
    assert all(p.grad is None for p in plain.parameters())


def test_an_mlp_that_does_more_is_left_alone() -> None:
    plain = trainee_of("llama", lora(fused=False))
    for module in plain.network.modules():
        if type(module).__name__ == "LlamaMLP":
            module.forward = _with_more(module)
    expected = outcome(plain)
    found = fuse(plain.network, lambda: plain.arithmetic(torch.device("cpu")))
    assert (found.linear, found.gated) == (14, 0)
    assert [proof.holds for proof in found.proofs].count(False) == 1
    again = outcome(plain)
    assert again[0] == pytest.approx(expected[0], rel=1e-6)
    assert distance(again[1], expected[1]) <= 1e-6


def _with_more(mlp: Any) -> Any:
    return lambda x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x).clamp(-0.02, 0.02))


@pytest.mark.parametrize("part", ["of_x", "of_a", "of_b", "forward"])
@pytest.mark.parametrize(("precision", "spoilt"), [("fp32", 1.1), ("bf16", 1.1), ("fp32", math.nan)])
def test_the_proof_sees_a_wrong_pass(
    part: str, precision: str, spoilt: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth too much anywhere, or what is not a number: nothing is fused."""
    real_products, real_gradients = adapted.products, adapted.gradients
    factors = [spoilt if part == each else 1 for each in ("of_a", "of_b")]

    def products(rows: Tensor, layers: Any) -> tuple[list[Tensor], Tensor]:
        outs, inner = real_products(rows, layers)
        return [out * (spoilt if part == "forward" else 1) for out in outs], inner

    def wrong(*given: Any, of_rows: bool) -> tuple[Tensor | None, list[Any]]:
        of_x, halves = real_gradients(*given, of_rows=of_rows)
        if of_x is not None and part == "of_x":
            of_x = of_x * spoilt
        of_a, of_b = factors
        return of_x, [(of_a * a, of_b * b) for a, b in halves if a is not None and b is not None]

    for module in (adapted, gated):
        monkeypatch.setattr(module, "products", products)
        monkeypatch.setattr(module, "gradients", wrong)
    found = trainee_of("llama", lora(), precision).fused
    assert (found.linear, found.gated, found.shared) == (0, 0, 0)
    assert not any(proof.holds for proof in found.proofs if "Norm" not in proof.what)


def test_a_trained_base_is_no_frozen_one() -> None:
    plain = trainee_of("llama", lora(fused=False))
    for module in plain.network.modules():
        if isinstance(module, nn.Linear):
            module.weight.requires_grad_()
    assert fuse(plain.network, None).linear == 0
