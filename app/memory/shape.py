"""Shape of the micro-batches of a step."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from app.base.structure import open_base
from app.batch import Batch
from app.config.dataset import has_pairs
from app.config.schema import RunConfig
from app.config.tasks import TASKS
from app.data.objectives import LabelledTokens, NextToken
from app.tasks.table import IMPLEMENTATIONS
from app.training.rows import layout_of


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one micro-batch that determine the memory of a step."""

    rows: int
    width: int  # positions of each row
    documents: tuple[int, ...]  # lengths of packed documents, padding included; () where rows are padded
    places: int  # entries of cu_seqlens but one, unused ones included; 0 where rows are padded
    longest: int  # max_seqlen
    label_rows: int  # rows of hidden states that go through the head
    micro_batches: int = 1  # per step and process
    keeps_gradients: bool = False  # whether they stay allocated between steps, as in DDP's buckets
    weighted: bool = False  # whether labels have loss weights
    pairs: bool = False  # whether the model reads token_type_ids

    @property
    def tokens(self) -> int:
        """Positions of a micro-batch, padding included."""
        return self.rows * self.width

    @classmethod
    def of(cls, batch: Batch, micro_batches: int = 1) -> "Shape":
        documents = batch.documents
        rows, width = batch.ids.shape
        return cls(
            rows=rows,
            width=width,
            documents=() if documents is None else documents.lengths,
            places=0 if documents is None else len(documents.cu_seqlens) - 1,
            longest=width if documents is None else documents.max_seqlen,
            label_rows=len(batch.label_rows),
            micro_batches=micro_batches,
            weighted=batch.weights is not None,
            pairs=batch.token_type_ids is not None,
        )

    def of_evaluation(self, run: RunConfig) -> "Shape":
        """Shape of evaluation batches: equal bins, or `eval.rows` rows of equal length and label count."""
        if run.batching.packing:
            return self
        rows = run.eval.rows * TASKS[run.task.kind].documents
        return replace(
            self,
            rows=rows,
            documents=(self.width,) * rows if self.documents else (),
            places=2 * rows if self.documents else 0,
            label_rows=-(-self.label_rows * rows // self.rows),
        )


def worst_case(run: RunConfig) -> Shape:
    """Largest micro-batch that the settings allow, without reading data.

    A full bin of rows of `dataset.max_length`, or `batching.rows` of them, padded; collated as those of a run are.
    """
    longest, count = run.dataset.max_length, run.batching.rows
    lengths = [longest] * count * TASKS[run.task.kind].documents
    if run.batching.packing:
        full, rest = divmod(run.batching.bin_tokens, longest)
        lengths = [longest] * full + [rest] * bool(rest)
    objective = _Unlabelled(open_base(run.model, run.task).is_bidirectional, has_pairs(run.dataset))
    rows: Any = lengths  # which is all that the objective reads of them
    batch = layout_of(run, count, objective).batch(rows, [np.arange(len(lengths))], len(lengths), epoch=0)
    labels = IMPLEMENTATIONS[run.task.kind].most_labels(run.task, sum(lengths), len(lengths))
    return replace(Shape.of(batch, run.batching.accumulation), label_rows=labels)


@dataclass(frozen=True, slots=True)
class _Unlabelled(NextToken):
    """An objective that needs no tokenizer: rows are lengths, of zeros without labels."""

    pairs: bool = False

    def label(self, rows: Any, i: int, epoch: int) -> tuple[LabelledTokens, ...]:  # noqa: ARG002
        none = np.zeros(0, np.int64)
        return (LabelledTokens(np.zeros(rows[i], np.int32), none, none, second_start=0 if self.pairs else -1),)
