"""The load-balancing loss of routers: transformers' own on one document, and the same however rows are laid out."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from app.batch import IGNORE
from app.config.load import compose_run
from app.config.schema import AdapterConfig, TaskConfig
from app.errors import ConfigError
from app.layers.experts import coefficient_of
from app.oom_retry import split_batch
from tests.model.small import batch_of, built, distance, documents_of, full, lora, outcome, packed, training_model_of

DOCUMENTS = documents_of((19, 7, 12))


def routed(kind: str, coefficient: float | str = 0.5, adapter: AdapterConfig | None = None, **given: Any) -> Any:
    return training_model_of(kind, adapter, task=TaskConfig(kind="causal", router_loss=coefficient), **given)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "qwen3_moe"])
def test_router_loss_of_one_document_is_that_of_transformers(kind: str) -> None:
    model, batch = routed(kind), batch_of(DOCUMENTS[:1])
    lm = model.language_model
    with torch.no_grad():
        loss, count = model(batch)
        logits = lm.base_model(batch.ids, output_router_logits=True).router_logits
        plain, _ = routed(kind, 0.0)(batch)
    expected = load_balancing_loss_func(logits, logits[0].shape[-1], lm.config.num_experts_per_tok)
    assert float(model.router_loss.sum) == pytest.approx(count * float(expected), rel=1e-6)
    assert float(loss) == pytest.approx(float(plain) + 0.5 * count * float(expected), rel=1e-6)


@pytest.mark.parametrize(("kind", "recompute"), [("mixtral", True), ("gpt_oss", False)])
def test_router_loss_does_not_depend_on_the_layout_of_rows(kind: str, recompute: bool) -> None:
    model, plain = routed(kind, recompute=recompute), routed(kind, 0.0)

    def summed(model: Any, batches: Any) -> Any:
        return outcome(model, lambda: sum(model(batch)[0] for batch in batches))

    each = [batch_of([document], labels_from=3) for document in DOCUMENTS]
    loss, found = summed(model, each)
    unlike = summed(plain, each)
    assert abs(loss - unlike[0]) > 1.0
    routers = [name for name in found if name.endswith((".gate.weight", ".router.weight"))]
    assert routers
    assert all(distance(found[name], unlike[1][name]) > 1e-3 for name in routers)
    for batch in (packed(DOCUMENTS, labels_from=3, filling=5), batch_of(DOCUMENTS, labels_from=3, fill=2)):
        for parts in ([batch], split_batch(batch, 1)):
            again, gradients = summed(model, parts)
            assert again == pytest.approx(loss, rel=1e-6)
            assert distance(gradients, found) <= 1e-6


@pytest.mark.parametrize("layout", [packed, batch_of])
def test_router_loss_of_a_micro_batch_without_rows_is_none(layout: Any) -> None:
    """Such ones fill up the last step of an epoch."""
    batch = layout(DOCUMENTS)
    no_labels = torch.full_like(batch.targets, IGNORE)
    model = routed("mixtral")
    loss, _ = model(replace(batch, lengths=(), targets=no_labels))
    assert float(loss.detach()) == float(model.router_loss.sum) == 0.0


def test_router_loss_is_summed_in_fp32_under_autocast() -> None:
    model = routed("mixtral")
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = model(packed(DOCUMENTS))
    assert loss.dtype == model.router_loss.sum.dtype == torch.float32


def test_router_loss_is_not_in_scores() -> None:
    batch = packed(DOCUMENTS)
    assert distance(routed("mixtral").scores(batch)[0], routed("mixtral", 0.0).scores(batch)[0]) == 0.0


@pytest.mark.parametrize(
    ("kind", "adapter", "expected"),
    [
        ("mixtral", full(), 0.001),
        ("mixtral", lora(experts=True), 0.001),
        ("mixtral", lora(), 0.0),
        ("llama", full(), 0.0),
        ("deepseek_v3", full(), 0.0),
    ],
)
def test_router_loss_auto_is_that_of_config_where_experts_train(
    kind: str, adapter: AdapterConfig, expected: float
) -> None:
    task, lm = compose_run(["recipe=lora"]).task, built(kind)
    assert task.router_loss == "auto"
    assert coefficient_of(task, adapter, lm) == expected
    if expected:
        lm.config.router_aux_loss_coef = 0.9  # of gpt-oss
        assert coefficient_of(task, adapter, lm) == 0.01
    remarks = routed(kind, "auto", adapter).remarks()
    assert ("task.router_loss=auto: 0.001, of config.json, at most 0.01" in remarks) == bool(expected)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_router_loss_of_model_without_one_is_refused(kind: str) -> None:
    lm: nn.Module = built(kind)
    with pytest.raises(ConfigError, match=rf"^task\.router_loss=0\.1: a model of kind {kind} has no router"):
        coefficient_of(TaskConfig(kind="causal", router_loss=0.1), full(), lm)
