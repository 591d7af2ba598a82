"""A task over pairs of answers of a test, its row format and its metric: one entry in each table of their kinds."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from app.batch import Batch
from app.config.kinds import ROW_FORMATS, Metric, PreferenceKind, RowFormat
from app.config.schema import Columns, DatasetConfig
from app.config.tasks import TASKS, Task
from app.config.validate import CHOICES
from app.data.columns import text
from app.data.objectives import LabeledTokens, label_next_tokens
from app.data.rows import Document, Row
from app.data.token_dataset import TokenRows
from app.model.losses import log_probabilities, over_documents
from app.model.training_model import TrainingModel
from app.tasks.interface import LOSS, WEIGHT, Counts, HeldOutRows, Implementation
from app.tasks.preference import Preference
from app.tracking.formatting import Sample
from app.training.trainer import Trainer
from tests.harness.runs import result
from tests.promise.conftest import Toys

RANKED = RowFormat(("sentence1", "sentence2"), content="answer", train_on=("auto",))
FIRST, MARGIN = 6, 7  # columns of its own among the sums of a row


def read_ranked(row: Row, columns: Columns) -> Document:
    """Both answers as one text; the loss mask says where the second one begins."""
    better = text(row, columns.sentence1)
    return Document(better + text(row, columns.sentence2), completion_start=len(better))


@dataclass(frozen=True, slots=True)
class Ranked:
    """Each row is two answers, of which the first is to be the likelier."""

    documents_per_row: ClassVar[int] = 2
    over_documents: ClassVar[bool] = True
    marked: ClassVar[str] = "to be the less likely"
    bidirectional: bool = False

    def label(self, rows: TokenRows, i: int, epoch: int) -> tuple[LabeledTokens, ...]:
        parts = np.split(rows.ids(i), [int(np.argmax(rows.loss_mask(i)))])
        return tuple(label_next_tokens(ids, np.arange(len(ids)) > 0) for ids in parts)

    def shown(self, rows: TokenRows, i: int) -> Any:
        return rows.loss_mask(i).astype(np.float32), ""


def gains(sums: Tensor) -> Tensor:
    return 0.2 * (sums[0::2] - sums[1::2])


def ranking(sums: Tensor, _batch: Batch) -> Tensor:
    return -F.logsigmoid(gains(sums))


def count_ranked(batch: Batch, losses: Tensor, _chosen: Tensor) -> Tensor:
    margins = gains(log_probabilities(losses, batch))
    return torch.stack([(margins > 0).double(), margins], dim=1)


RATIOS = {"eval_loss": (LOSS, WEIGHT), "accuracy": (FIRST, WEIGHT), "ranked_margin": (MARGIN, WEIGHT)}


def compared(held_out: HeldOutRows, model: TrainingModel) -> list[Sample]:
    texts = [held_out.text(held_out.rows.ids(i)) for i in held_out.indices]
    return [Sample(prompt=each, expected="first", answer="either") for each in texts]


ENTRIES: dict[str, Any] = {
    "TASKS": Task(
        **{name: getattr(TASKS["causal"], name) for name in Task.__slots__}
        | {"name": "ranking", "formats": ("ranked",), "other_rows": "task=ranking compares two answers."}
    ),
    "IMPLEMENTATIONS": Implementation(
        objective=lambda *_: Ranked(),
        loss=lambda *_: over_documents(ranking),
        counts=lambda _run: Counts(RATIOS, task_columns=count_ranked, num_task_columns=2),
        answers=compared,
    ),
}


@pytest.fixture
def ranking_toys(toys: Toys) -> Toys:
    toys.add("row format", "ranked", {"ROW_FORMATS": RANKED, "READERS": read_ranked})
    fmt = DatasetConfig.__dataclass_fields__["format"]
    toys.monkeypatch.setattr(fmt, "metadata", {CHOICES: ("auto", *ROW_FORMATS)})  # as its import makes it
    toys.choice("dataset", "ranked", "defaults: [_policy, _self_]\nformat: ranked\n")
    toys.add(
        "metric", "ranked_margin", {"METRICS": Metric("ranked_margin", "margin", ".3f", "higher", "", logged=False)}
    )
    toys.add("task", "ranking", ENTRIES)
    toys.choice("task", "ranking", "kind: ranking\n")
    for name, count in (("train", 30), ("eval", 9)):
        lines = [{"sentence1": "yes" + " ha" * (1 + i % 7), "sentence2": " no" * (1 + i % 5)} for i in range(count)]
        (toys.folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return toys


def formula(trainer: Trainer) -> float:
    """The mean loss of the held-out rows: of each document by itself, in float64 over all logits."""
    lm, losses = trainer.parts.stepper.model.eval().language_model.double(), []
    assert trainer.parts.eval_batches is not None
    for batch in trainer.parts.eval_batches():
        sums = []
        for start, length in zip(batch.starts, batch.lengths, strict=True):
            ids = batch.ids.flatten()[start : start + length]
            with torch.no_grad():
                scores = lm(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            sums.append(scores.gather(1, ids[1:, None]).sum())
        losses.append(ranking(torch.stack(sums), batch))
    return float(torch.cat(losses).mean())


def train(toys: Toys, name: str, *more: str) -> Path:
    rows = (
        f"dataset.{key}={toys.folder / f'{file}.jsonl'}" for key, file in (("path", "train"), ("eval_path", "eval"))
    )
    return toys.train(name, "recipe=full", "task=ranking", "dataset=ranked", "optimizer.lr=1e-2", *rows, *more)


@pytest.mark.parametrize("packing", ["true", "false"])
def test_task_over_pairs_trains_by_its_formula(packing: str, ranking_toys: Toys) -> None:
    trainer = ranking_toys.last_trainer()
    layout = f"batching.packing={packing}"
    run = train(ranking_toys, "run", layout)
    found = result(run)
    assert found["eval_loss"] == pytest.approx(formula(trainer()), rel=1e-6)
    assert found["eval_loss"] < found["start_metrics"]["eval_loss"]
    assert found["final_metrics"]["accuracy"] > 0.8 > found["start_metrics"]["accuracy"]
    assert found["final_metrics"]["ranked_margin"] > found["start_metrics"]["ranked_margin"]
    # of padded steps the largest one is planned, and another one measured
    assert 0.98 < found["memory_predicted_bytes"] / found["memory_measured_bytes"] < 1.15


def test_task_whose_objective_does_not_say_that_its_loss_is_over_documents_is_named(ranking_toys: Toys) -> None:
    silent = type("Silent", (Ranked,), {"over_documents": False})
    implementation = replace(ENTRIES["IMPLEMENTATIONS"], objective=lambda *_: silent())
    ranking_toys.add("task", "ranking", ENTRIES | {"IMPLEMENTATIONS": implementation})
    with pytest.raises(AssertionError, match=r"^over_documents: the task's objective must have it"):
        train(ranking_toys, "silent")


def test_preference_loss_trains_from_its_entries_alone(toys: Toys) -> None:
    """A hinge on the margin, which is 0 before step 1, where the model is its own reference."""
    hinge = Preference(
        reward=lambda answers, settings: settings.beta * answers.ratio,
        of_margin=lambda margin, _settings: (1 - margin).clamp(min=0),
    )
    toys.add("preference loss", "hinge", {"PREFERENCE_KINDS": PreferenceKind(), "PREFERENCES": hinge})
    toys.choice("preference", "hinge", "kind: hinge\nbeta: 0.1\n")
    found = result(toys.train("run", "recipe=dpo", "preference=hinge", "optimizer.lr=1e-2", "batching.tokens=128"))
    assert found["start_metrics"]["eval_loss"] == pytest.approx(1.0, abs=1e-6)
    assert found["eval_loss"] < 0.9
