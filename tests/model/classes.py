"""Tiny random models with a head for classes, and batches for them."""

from typing import Any

import torch

from app.batch import Batch
from app.config.schema import TaskConfig
from app.data.collate import BinShape, collate_packed, collate_padded
from app.data.objectives import LabeledTokens
from app.model.training_model import TrainingModel
from tests.model.small import (
    ENCODERS,
    KINDS,
    WIDTH,
    documents_of,
    lora,
    model_config,
    numbers,
    training_model_of,
    wide_numbers,
)

LABELS = ("north", "east", "south")
CLASSES = TaskConfig(kind="classification", labels=list(LABELS))
DOCUMENTS = documents_of((20, 5, 11))
TARGETS = (2, 0, 2)
SECOND = (12, 3, 6)  # where the second side of each begins
TAKES_SIDES = frozenset({"bert", "electra"})
_UNDROPPED = ("dropout", "attention_dropout", "seq_classif_dropout", "hidden_dropout_prob")
_MORE: dict[str, dict[str, Any]] = {
    "distilbert": {},
    **{kind: {"attention_probs_dropout_prob": 0.0} for kind in ("electra", "albert")},
    "eurobert": {},
}
POOLED = ("llama", "qwen3", "gpt2", "mistral", *ENCODERS, *_MORE)


def of_classes(kind: str, **given: Any) -> TrainingModel:
    """A training_model of three classes; `quantization` makes it as wide as that needs."""
    wide = "quantization" in given
    architecture = (wide_numbers if wide else numbers)(kind)
    if kind in _MORE:
        size, inner = (64, 128) if wide else (WIDTH, 48)
        architecture |= dict.fromkeys(_UNDROPPED, 0.0) | _MORE[kind] | {"embedding_size": size}
        architecture |= {"dim": size, "hidden_dim": inner, "n_layers": 2, "n_heads": 4}
    model = model_config(kind, architecture=architecture)
    return training_model_of(kind, given.pop("adapter", None), model=model, task=CLASSES, **given)


def rows(kind: str, targets: tuple[int, ...] = TARGETS) -> list[LabeledTokens]:
    """Labels as `app.data.labels` makes them."""
    sides = SECOND if kind in TAKES_SIDES else (-1, -1, -1)
    return [
        LabeledTokens(
            document.numpy(),
            torch.tensor([len(document) - 1 if kind in KINDS else 0]).numpy(),
            torch.tensor([target]).numpy(),
            second_start=second,
        )
        for document, target, second in zip(DOCUMENTS, targets, sides, strict=True)
    ]


def in_one_row(kind: str) -> Batch:
    """Packed, with something that fills up."""
    return collate_packed(rows(kind), 0, BinShape(44, 20, 6))


def in_rows(kind: str) -> Batch:
    """Padded."""
    return collate_padded(rows(kind), 0, isolate=kind not in KINDS)


def adapted(kind: str, **given: Any) -> TrainingModel:
    """A model for classes with an adapter."""
    return of_classes(kind, adapter=lora(), **given)
