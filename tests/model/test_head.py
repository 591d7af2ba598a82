"""A head for classes: every kind, packed and padded, full, LoRA and QLoRA, against one document at a time.

Each document goes through the model's own forward, with its own attention and pooling, and torch's
cross-entropy.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from app.base.base_model import drawing_by, load_base, read_weights
from app.base.base_weights import LoadOptions
from app.base.tokenizer import load_tokenizer
from app.batch import Batch
from app.config.schema import ModelConfig, TaskConfig
from app.config.tasks import task_of
from app.data.objectives import LabelledTokens
from app.errors import ConfigError, EnvironmentProblem
from app.finished.save import save_model
from app.layers.attention import NAME, register
from app.layers.head import head_modules
from app.model.checks import check_head, check_packing
from app.model.training_model import TrainingModel
from app.oom_retry import split_batch
from tests.choices import taking_turns
from tests.model.classes import CLASSES, LABELS, POOLED, adapted, in_one_row, in_rows, of_classes, rows
from tests.model.small import distance, model_config, outcome
from tests.model.test_matrix import METHODS

CPU = torch.device("cpu")


def one_by_one(training_model: TrainingModel, kind: str) -> tuple[float, dict[str, Tensor]]:
    lm = training_model.language_model
    lm.set_attn_implementation("eager")
    try:
        return outcome(training_model, lambda: torch.stack([alone(lm, row) for row in rows(kind)]).sum())
    finally:
        lm.set_attn_implementation(NAME)


def alone(lm: Any, row: LabelledTokens) -> Tensor:
    ids = torch.from_numpy(row.ids)
    sides = {}
    if row.second_start >= 0:
        sides["token_type_ids"] = (torch.arange(len(ids)) >= row.second_start).long()[None]
    logits = lm(input_ids=ids[None], use_cache=False, **sides).logits
    return F.cross_entropy(logits, torch.from_numpy(row.targets).long(), reduction="sum")


@pytest.mark.parametrize(("kind", "method"), taking_turns(tuple(POOLED), tuple(METHODS)))
def test_class_loss_equals_one_document_at_a_time(kind: str, method: str) -> None:
    training_model = of_classes(kind, **METHODS[method])
    expected_loss, expected = one_by_one(training_model, kind)
    assert all(float(each.norm()) > 0 for name, each in expected.items() if "modules_to_save" in name)
    for layout in (in_one_row, in_rows):
        loss, found = outcome(training_model, layout(kind))
        assert loss == pytest.approx(expected_loss, rel=1e-5), layout.__name__
        assert distance(found, expected) <= 1e-5, layout.__name__


@pytest.mark.parametrize("layout", [in_one_row, in_rows])
def test_split_parts_keep_token_type_ids(layout: Callable[[str], Batch]) -> None:
    model, whole = of_classes("bert").eval(), layout("bert")
    parts = split_batch(whole, 2)
    assert len(parts) == 3
    loss = sum(float(model(part)[0].detach()) for part in parts)
    assert loss == pytest.approx(float(model(whole)[0].detach()), rel=1e-5)
    without = replace(whole, token_type_ids=None)
    assert loss != pytest.approx(float(model(without)[0].detach()), rel=1e-4), "or it would show nothing"


@pytest.mark.parametrize(("kind", "precision"), taking_turns(tuple(POOLED), ("fp32", "bf16")))
def test_check_head_and_packing_pass_pooled_kind(kind: str, precision: str) -> None:
    training_model = adapted(kind, precision=precision)
    for layout in (in_one_row, in_rows):
        assert check_head(training_model, layout(kind)).passed, layout.__name__
    assert all(proof.passed for proof in check_packing(training_model, in_one_row(kind)))


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_check_head_state_that_is_not_pooled_is_refused(kind: str) -> None:
    training_model, batch = of_classes(kind), in_one_row(kind)
    other = replace(batch, label_rows=batch.label_rows + (1 if kind == "bert" else -1))
    with pytest.raises(EnvironmentProblem, match=f"a model of kind {kind} computes its logits in a way"):
        check_head(training_model, other)


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert", "distilbert"])
def test_pooled_head_is_trained_whole_in_fp32(kind: str) -> None:
    training_model = adapted(kind, precision="bf16")
    trained = training_model.trained()
    assert {p.dtype for p in trained.values()} == {torch.float32}
    for module in head_modules(training_model.language_model):
        assert any(f".{module}.modules_to_save.default." in name for name in trained), module
    assert not any("lora_" in name and "pooler" in name for name in trained)


def test_load_base_new_classifier_drawn_from_seed_alone(tmp_path: Path) -> None:
    masked = TaskConfig(kind="masked")
    base = load_base(model_config("bert"), task_of(masked), LoadOptions(torch.float32, CPU, register("sdpa")), 5)
    base.save_pretrained(str(tmp_path))
    config = ModelConfig(path=str(tmp_path), weights="pretrained", architecture={})

    def drawn(seed: int) -> Any:
        torch.manual_seed(torch.seed() % 1000)  # whatever was drawn before
        return load_base(config, task_of(CLASSES), LoadOptions(torch.float32, CPU, register("sdpa")), seed)

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert first.config.id2label == dict(enumerate(LABELS))
    assert distance(again.state_dict(), first.state_dict()) == 0
    assert not torch.equal(other.classifier.weight, first.classifier.weight)
    body, known = first.bert.encoder.state_dict(), base.bert.encoder.state_dict()
    assert distance(body, known) == 0

    first.save_pretrained(str(tmp_path))
    assert torch.equal(drawn(7).classifier.weight, first.classifier.weight), "one of the same labels goes on"
    with pytest.raises(ConfigError, match=r"it has a classifier already, of north, east, south, and the labels"):
        read_weights(config, task_of(TaskConfig(kind="classification", labels=["a", "b", "c"])), tmp_path)
    two = task_of(TaskConfig(kind="classification", labels=["a", "b"]))
    with drawing_by(0):
        assert read_weights(config, two, tmp_path).classifier.out_features == 2


@pytest.mark.parametrize("kind", ["llama", "bert", "roberta"])
def test_saved_classifier_loads_in_ordinary_tools(kind: str, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from app.finished.save import save_base

    training_model = adapted(kind)
    for name, parameter in training_model.trained().items():
        if "modules_to_save" in name:
            parameter.data += 0.3
    tokenizer = load_tokenizer(model_config(), needs_template=False)
    save_base(training_model, tokenizer, tmp_path / "base")
    save_model(training_model, tokenizer, tmp_path / "final")
    numbers = AutoConfig.from_pretrained(str(tmp_path / "final"))
    assert numbers.label2id == {name: at for at, name in enumerate(LABELS)}
    lm = AutoModelForSequenceClassification.from_pretrained(str(tmp_path / "base"), config=numbers)
    tuned = PeftModel.from_pretrained(lm, str(tmp_path / "final")).eval()
    for row in rows("llama"):
        ids = torch.from_numpy(row.ids)[None]
        with torch.no_grad():
            expected = training_model.eval().language_model(input_ids=ids, use_cache=False).logits
            assert distance(tuned(input_ids=ids, use_cache=False).logits, expected) < 1e-5
