"""Training losses of every kind of model, packed and padded, and what changes training alone."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from app.batch import Batch, LossWeights, PackedSequences
from app.config.schema import QuantizationConfig, TaskConfig
from app.errors import ConfigError, EnvironmentProblem
from app.layers.attention import BACKENDS, NAME
from app.layers.attention.requirements import Rules
from app.layers.attention.sdpa import sdpa
from app.layers.head import linear_head
from app.model.checks import check_packing
from app.model.training_model import TrainingModel, freeze
from tests.choices import taking_turns
from tests.model.small import (
    ALL_KINDS,
    ENCODERS,
    RECURRENT,
    batch_of,
    distance,
    documents_of,
    lora,
    outcome,
    packed,
    training_model_of,
)

LENGTHS = (9, 5, 12)


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("adapter", [None, lora()], ids=["full", "lora"])
def test_dft_is_the_loss_times_the_probability_held_constant(adapter: Any, linear: bool) -> None:
    model = training_model_of("llama", adapter, task=TaskConfig(kind="causal", loss="dft"))
    model.use_linear_head(linear_head(model.language_model) if linear else None)
    documents = documents_of(LENGTHS)
    weights = torch.rand(sum(LENGTHS) - len(LENGTHS), generator=torch.Generator().manual_seed(5))

    def formula() -> Tensor:
        total = torch.zeros(())
        for each, weight in zip(documents, weights.split([n - 1 for n in LENGTHS]), strict=True):
            scores = model.language_model(input_ids=each[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            log_probabilities = scores.gather(1, each[1:, None])[:, 0]
            total = total - (weight * log_probabilities.detach().exp() * log_probabilities).sum()
        return total

    loss, expected = outcome(model, formula)
    for batch in (packed(documents), batch_of(documents)):
        found, gradient = outcome(model, replace(batch, weights=LossWeights(weights, float(weights.sum()))))
        assert found == pytest.approx(loss, rel=1e-5)
        assert distance(gradient, expected) <= 1e-5


def embeddings_of(model: TrainingModel, batch: Any) -> Tensor:
    found: list[Tensor] = []
    hook = model.language_model.get_input_embeddings().register_forward_hook(lambda _m, _i, out: found.append(out))
    model(batch)
    hook.remove()
    return found[0].detach()


@pytest.mark.parametrize("recompute", [False, True])
def test_neftune_noise_is_scaled_by_the_length_of_each_document(recompute: bool) -> None:
    documents = documents_of(LENGTHS)
    plain = training_model_of("llama", recompute=recompute)
    noisy = training_model_of("llama", recompute=recompute, neftune=5.0)
    width = plain.language_model.config.hidden_size
    for batch, ends in ((packed(documents, filling=3), (0, 9, 14, 26)), (batch_of(documents), (0, 12, 24, 36))):
        noise = (embeddings_of(noisy, batch) - embeddings_of(plain, batch)).flatten(0, 1)
        for length, first, end in zip(LENGTHS, ends, ends[1:], strict=False):
            largest = float(noise[first:end].abs().max())
            assert 0.9 <= largest / (5.0 / (length * width) ** 0.5) <= 1.0 + 1e-5
    assert outcome(noisy, batch)[0] == outcome(noisy, batch)[0] != outcome(plain, batch)[0]
    assert torch.equal(noisy.eval().scores(batch)[0], plain.eval().scores(batch)[0])


def test_frozen_weights_get_no_gradient_and_the_others_the_same() -> None:
    whole = training_model_of("llama")
    part = training_model_of("llama", freeze=("embed_tokens", "layers.0.mlp", "q_proj"))
    batch = batch_of(documents_of(LENGTHS))
    expected, found = outcome(whole, batch)[1], outcome(part, batch)[1]
    left = expected.keys() - found.keys()
    assert left == {n for n in expected if "embed_tokens" in n or "layers.0.mlp" in n or "q_proj" in n}
    assert distance(found, {name: expected[name] for name in found}) <= 1e-6


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ("embed_token",),
            "training.freeze: embed_token is not part of any weight name in this model. Did you mean embed",
        ),
        (("weight",), r"training.freeze=\[weight\] leaves nothing to train"),
    ],
)
def test_freeze_refuses_what_is_none_or_all(patterns: tuple[str, ...], message: str) -> None:
    network = copy.deepcopy(training_model_of("llama").network)
    with pytest.raises(ConfigError, match=message):
        freeze(network, patterns)


DOCUMENTS = documents_of((20, 5, 11))  # longer than the window of 8, shorter, and neither
FIRST = 3  # the first token that is trained
NF4 = QuantizationConfig(kind="nf4", double_quant=True)
EXPERTS = {"gpt_oss", "mixtral", "qwen3_next", "jamba"}  # not quantized yet, and refused: test_quantization.py
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "full-recomputed": {"recompute": True},
    "lora": {"adapter": lora()},
    "lora-recomputed": {"adapter": lora(), "recompute": True},
    "qlora": {"adapter": lora(), "quantization": NF4},
    "qlora-recomputed": {"adapter": lora(), "quantization": NF4, "recompute": True},
}
CASES = [(k, m) for k in ALL_KINDS for m in METHODS if not (m.startswith("qlora") and k in EXPERTS)]
QUICK = [case for case in taking_turns(ALL_KINDS, tuple(METHODS)) if case in CASES]
QUICK += [("qwen3_5_text", "lora-recomputed"), ("falcon_h1", "full")]
CASES += [(k, m) for k in RECURRENT for m in METHODS if not (m.startswith("qlora") and k in EXPERTS)]
SLOW = [case for case in CASES if case not in QUICK]


def one_by_one(training_model: TrainingModel) -> tuple[float, dict[str, Tensor]]:
    lm = training_model.language_model
    lm.set_attn_implementation("eager")  # until after backward, which may compute forward again
    try:
        return outcome(training_model, lambda: torch.stack([_alone(lm, document) for document in DOCUMENTS]).sum())
    finally:
        lm.set_attn_implementation(NAME)


def _alone(lm: Any, document: Tensor) -> Tensor:
    logits = lm(input_ids=document[None], use_cache=False).logits[0]
    return F.cross_entropy(logits[FIRST - 1 : -1], document[FIRST:], reduction="sum")


def in_one_row(_kind: str) -> Batch:
    return packed(DOCUMENTS, labels_from=FIRST, filling=6)


def in_rows(kind: str) -> Batch:
    return batch_of(DOCUMENTS, labels_from=FIRST, isolate=kind in ENCODERS)


@pytest.mark.parametrize(("kind", "method"), [*QUICK, ("gpt_oss", "lora"), ("mixtral", "full-recomputed")])
def test_model_equals_one_document_at_a_time(kind: str, method: str) -> None:
    check_one_by_one(kind, method)


def check_one_by_one(kind: str, method: str) -> None:
    training_model = training_model_of(kind, **METHODS[method])
    expected_loss, expected = one_by_one(training_model_of(kind, **METHODS[method]))
    for layout in (in_one_row, in_rows):
        loss, found = outcome(training_model, layout(kind))
        assert loss == pytest.approx(expected_loss, rel=1e-5), layout.__name__
        assert distance(found, expected) <= 1e-5, layout.__name__


# others: test_head.py, tests/full/model/test_model_kinds.py
@pytest.mark.parametrize(
    ("kind", "precision"),
    taking_turns(
        ("llama", "gemma2", "phi3", "granite", "cohere2", "mixtral", "gpt_oss", "falcon_h1"), ("fp32", "bf16")
    ),
)
def test_check_packing_passes_kind(kind: str, precision: str) -> None:
    training_model = training_model_of(kind, lora(), precision)
    for batch in (packed(DOCUMENTS), in_rows(kind)):
        assert all(each.passed for each in check_packing(training_model, batch))


@pytest.mark.parametrize(("kind", "precision"), [("llama", "fp32"), ("gemma2", "bf16"), ("bert", "fp32")])
def test_check_packing_wrong_gradient_is_refused(kind: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A right forward pass and a wrong backward pass."""

    def wrong(q: Tensor, k: Tensor, v: Tensor, rules: Rules, documents: PackedSequences | None) -> Tensor:
        return sdpa(q, k, v.detach(), rules, documents)

    monkeypatch.setitem(BACKENDS, "sdpa", replace(BACKENDS["sdpa"], run=wrong))
    training_model = training_model_of(kind, lora(), precision)
    with pytest.raises(EnvironmentProblem, match=rf"attention=sdpa: it computes different gradients .* of kind {kind}"):
        check_packing(training_model, packed(DOCUMENTS))


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_check_packing_layer_without_its_gradient_is_refused(layout: str) -> None:
    """Doge's mask is made of numbers that begin at zero: logits are right until they are trained."""
    batch = packed(DOCUMENTS) if layout == "packed" else batch_of(DOCUMENTS)
    with pytest.raises(
        EnvironmentProblem, match=rf"a model of kind doge computes different gradients for {layout} documents"
    ):
        check_packing(training_model_of("doge"), batch)
