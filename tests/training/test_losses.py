"""A loss over documents: its sum and gradient are those of its formula over all logits, however rows are laid out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from app.batch import Batch
from app.config.schema import TaskConfig
from app.data.collate import Layout, Packed, Padded
from app.data.objectives import LabelledTokens, label_next_tokens
from app.data.token_dataset import TokenRows
from app.distributed.process_group import Runtime
from app.model.chunked_loss import linear_head
from app.model.losses import over_documents
from app.model.training_model import TrainingModel
from app.oom_retry import halve, split_batch
from app.training.scores import counts_of, score_rows
from tests.model.small import distance, documents_of, lora, outcome, training_model_of
from tests.training.conftest import small_run

LENGTHS = ((9, 5), (12, 12), (4, 11))
ANSWERS_FROM = 2


def preference(sums: Tensor, batch: Batch) -> Tensor:
    """Of pairs: some function of both answers that is neither linear nor symmetric."""
    wanted, other = sums[0::2], sums[1::2]
    lengths = torch.tensor(batch.lengths, dtype=torch.float64, device=sums.device)
    return -F.logsigmoid(0.3 * (wanted - other)) - 0.2 * wanted / lengths[0::2]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Each row is two answers."""

    documents_per_row: ClassVar[int] = 2
    over_documents: ClassVar[bool] = True
    marked: ClassVar[str] = "to be predicted"
    bidirectional: bool = False

    def label(self, rows: TokenRows, i: int, epoch: int) -> tuple[LabelledTokens, ...]:
        return tuple(
            label_next_tokens(each, np.arange(len(each)) >= ANSWERS_FROM)
            for each in np.split(rows.ids(i), [rows.second_start(i)])
        )

    def shown(self, rows: TokenRows, i: int) -> Any:
        raise NotImplementedError


class Rows:
    """Rows of two documents, one behind the other."""

    lengths = np.array([sum(each) for each in LENGTHS], np.int32)

    def __len__(self) -> int:
        return len(LENGTHS)

    def ids(self, i: int) -> Any:
        return torch.cat(documents_of(LENGTHS[i], seed=i)).numpy().astype(np.int32)

    def second_start(self, i: int) -> int:
        return LENGTHS[i][0]


ROWS: Any = Rows()
LAYOUTS: dict[str, Layout] = {"packed": Packed(64, 0, 12, Pairs()), "padded": Padded(3, 0, Pairs())}


def batch_of(layout: str, rows: Sequence[int] = range(3)) -> Batch:
    return LAYOUTS[layout].batch(ROWS, [np.array(rows)], 8, epoch=0)


def model_of(adapter: Any = None) -> TrainingModel:
    model = training_model_of("llama", adapter, task=TaskConfig(kind="causal"))
    model.loss = over_documents(preference)
    return model


def loss_of(model: TrainingModel, parts: Sequence[Batch]) -> Tensor:
    return torch.stack([model(part)[0] for part in parts]).sum()


def formula(model: TrainingModel) -> Tensor:
    """Each document by itself, all logits, log-probabilities in float64."""
    sums = []
    for i in range(len(LENGTHS)):
        for document in documents_of(LENGTHS[i], seed=i):
            logits = model.language_model(input_ids=document[None], use_cache=False).logits[0]
            scores = logits.double().log_softmax(-1)[ANSWERS_FROM - 1 : -1]
            sums.append(scores.gather(1, document[ANSWERS_FROM:, None]).sum())
    whole = batch_of("padded")
    return preference(torch.stack(sums), whole).sum()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("adapter", [None, lora()], ids=["full", "lora"])
def test_loss_over_documents_equals_its_formula(layout: str, linear: bool, adapter: Any) -> None:
    model = model_of(adapter)
    model.linear = linear_head(model.language_model) if linear else None
    loss, found = outcome(model, lambda: formula(model))
    batch = batch_of(layout)
    assert batch.label_weight == 3.0
    for parts in ([batch], split_batch(batch, 1), split_batch(batch, 5)):
        summed = outcome(model, partial(loss_of, model, parts))
        assert summed[0] == pytest.approx(loss, rel=1e-6)
        assert distance(summed[1], found) <= 2e-6
        assert sum(part.label_weight for part in parts) == 3.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_halve_never_parts_a_row(layout: str) -> None:
    parts = split_batch(batch_of(layout), 5)
    assert [part.lengths for part in parts] == list(LENGTHS)
    assert [halve(part) for part in parts] == [[], [], []]
    for part in parts:
        assert part.document_of_label is not None
        assert part.document_of_label.unique().tolist() == [0, 1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_scored_by_their_loss(layout: str, runtime: Runtime) -> None:
    model = model_of()
    losses = [outcome(model, batch_of(layout, [i]))[0] for i in range(3)]
    batch = batch_of(layout)
    whole = LAYOUTS[layout].batch(ROWS, [np.array([2, 0, 1])], 8, epoch=0)
    sums = score_rows(model, [replace(whole, samples=(2, 0, 1))], runtime, 3, counts_of(small_run()))
    assert sums[:, 0].tolist() == pytest.approx(losses, rel=1e-6)
    assert sums[:, 5].tolist() == [1.0, 1.0, 1.0]
    assert sums[:, 1].sum() == batch.num_labels
