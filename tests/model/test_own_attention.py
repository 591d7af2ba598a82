"""Padded rows through the model's own attention, for kinds whose attention ours cannot replace."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from app.batch import Batch
from app.config.schema import TaskConfig
from app.errors import EnvironmentProblem
from app.model.checks import check_causal, check_head, check_packing
from app.model.training_model import TrainingModel
from tests.model import classes, small

DOCUMENTS = small.documents_of((20, 5, 11))
BLOOM = {"model_type": "bloom", "vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}
_XLM = {"model_type": "xlm", "vocab_size": 64, "emb_dim": 32, "n_layers": 1, "n_heads": 4, "dropout": 0.0}
_UNDROPPED = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "pooler_dropout"), 0.0)


def own(architecture: dict[str, Any], task: TaskConfig) -> TrainingModel:
    model = small.model_config(architecture={"initializer_range": 0.3, **architecture})
    return small.training_model_of("", small.lora(), model=model, task=task, attention="own")


def encoder(kind: str) -> dict[str, Any]:
    return {**small.numbers("bert"), "model_type": kind, **_UNDROPPED}


def compare(model: TrainingModel, batch: Batch, loss_alone: Any) -> None:
    """The loss and every gradient, as each document alone gives them."""
    loss, found = small.outcome(model, batch)
    expected_loss, expected = small.outcome(model, lambda: torch.stack(loss_alone(model.language_model)).sum())
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert small.distance(found, expected) <= 1e-5
    assert all(each.passed for each in (check_head(model, batch), *check_packing(model, batch)))


def test_own_attention_of_a_decoder_equals_one_document_at_a_time() -> None:
    def alone(lm: Any) -> list[torch.Tensor]:
        logits = [lm(input_ids=each[None], use_cache=False).logits[0, :-1] for each in DOCUMENTS]
        return [F.cross_entropy(out, ids[1:], reduction="sum") for out, ids in zip(logits, DOCUMENTS, strict=True)]

    model = own(BLOOM, TaskConfig(kind="causal"))
    assert [each.difference for each in check_causal(model, small.batch_of(DOCUMENTS))] == [0.0]
    compare(model, small.batch_of(DOCUMENTS), alone)


@pytest.mark.parametrize("kind", ["deberta-v2", "mpnet"])
def test_own_attention_of_an_encoder_does_not_see_padding(kind: str) -> None:
    def alone(lm: Any) -> list[torch.Tensor]:
        logits = [lm(input_ids=each[None]).logits[0, :-1] for each in DOCUMENTS]
        return [F.cross_entropy(out, ids[1:], reduction="sum") for out, ids in zip(logits, DOCUMENTS, strict=True)]

    model = own(encoder(kind), TaskConfig(kind="masked", mask_share=0.15))
    compare(model, small.batch_of(DOCUMENTS, isolate=True), alone)


@pytest.mark.parametrize("kind", ["deberta-v2", "mpnet"])
def test_own_attention_of_a_classifier_does_not_see_padding(kind: str) -> None:
    def alone(lm: Any) -> list[torch.Tensor]:
        logits = [lm(input_ids=each[None]).logits for each in classes.DOCUMENTS]
        targets = (torch.tensor([each]) for each in classes.TARGETS)
        return [F.cross_entropy(out, target) for out, target in zip(logits, targets, strict=True)]

    compare(own(encoder(kind), classes.CLASSES), classes.in_rows("bert"), alone)


def test_own_attention_that_sees_later_tokens_is_refused() -> None:
    model = own({**_XLM, "causal": True}, TaskConfig(kind="causal"))
    assert check_causal(model, small.batch_of(DOCUMENTS))[0].passed
    model = own({**_XLM, "causal": False}, TaskConfig(kind="causal"))
    with pytest.raises(EnvironmentProblem, match="of kind xlm tokens see those after them"):
        check_causal(model, small.batch_of(DOCUMENTS))
