"""Dynamic fine-tuning, noise on embeddings, frozen weights: what changes training alone."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from app.batch import LossWeights
from app.config.schema import TaskConfig
from app.errors import ConfigError
from app.layers.head import linear_head
from app.model.training_model import TrainingModel, freeze
from tests.model.small import batch_of, distance, documents_of, lora, outcome, packed, training_model_of

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
            "training.freeze: embed_token is no part of a weight's name in this model. Did you mean embed",
        ),
        (("weight",), r"training.freeze=\[weight\] leaves nothing to train"),
    ],
)
def test_freeze_refuses_what_is_none_or_all(patterns: tuple[str, ...], message: str) -> None:
    network = copy.deepcopy(training_model_of("llama").network)
    with pytest.raises(ConfigError, match=message):
        freeze(network, patterns)
