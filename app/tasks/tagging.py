"""Token classification: a tag for each word, such as named entities.

Entity F1 follows seqeval and CoNLL. An entity is a contiguous run of words of one type. It starts at B or S, after E or
S, or at a type change, so a run may start with I. It is correct if its type, start and end are correct.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.batch import Batch
from app.config.schema import RunConfig
from app.data.labels import parts_of
from app.data.token_dataset import TokenRows
from app.model.training_model import TrainingModel
from app.tasks.classification import Classification, class_loss, macro_f1, objective_of_labels, occurrences
from app.tasks.interface import HITS, LABELS, LOSS, WEIGHT, Counts, HeldOutRows, Implementation, Metrics, Sums
from app.tracking.formatting import Sample

_OUTSIDE = "O"
_LETTERS, _STARTS, _ENDS = "BIES", "BS", "ES"  # tag prefixes inside entities, at their start, and at their end
_ENTITIES = 3  # true, predicted, both


@dataclass(frozen=True, slots=True)
class WordTags(Classification):
    """Tags of words, predicted from the hidden state of the first token of each word."""

    marked: ClassVar[str] = "the first token of each word, which predicts its tag"

    def at(self, rows: TokenRows, i: int) -> NDArray[np.int64]:
        return np.flatnonzero(rows.loss_mask(i))

    def shown(self, rows: TokenRows, i: int) -> tuple[NDArray[np.float32], str]:
        return rows.loss_mask(i).astype(np.float32), " ".join(parts_of(rows.class_of(i)))


def _counts(run: RunConfig) -> Counts:
    """Return counts of tags, with entity F1 only for entity tags (B-, I-)."""
    names = run.task.labels
    ratios, classes = {"eval_loss": (LOSS, WEIGHT), "accuracy": (HITS, LABELS)}, len(names)
    entities = are_entities(names)
    task_columns = partial(_of_rows, classes, names if entities else [])
    metrics, count = _f1 if entities else macro_f1, 3 * classes + _ENTITIES * entities
    return Counts(ratios, metrics, task_columns=task_columns, num_task_columns=count)


def are_entities(names: Sequence[str]) -> bool:
    """Return whether the tags are O and names like B-PER."""
    return any(name != _OUTSIDE for name in names) and all(
        name == _OUTSIDE or (name[:1] in _LETTERS and name[1:2] in ("", "-")) for name in names
    )


def _f1(sums: Sums) -> Metrics:
    true, predicted, both = np.split(sums[..., -_ENTITIES:], _ENTITIES, axis=-1)
    return {**macro_f1(sums[..., :-_ENTITIES]), "entity_f1": (2 * both / (true + predicted))[..., 0]}


def _of_rows(classes: int, entities: Sequence[str], batch: Batch, losses: Tensor, predictions: Tensor) -> Tensor:
    """Return how often each tag, and each entity, is true, predicted or both in each row."""
    starts = torch.tensor(batch.starts, device=batch.label_rows.device)
    row = torch.searchsorted(starts, batch.label_rows[: batch.num_labels], right=True) - 1  # a document is a row
    columns = [occurrences(classes, batch, losses, predictions)]
    if entities:
        true, predicted = (_entities(entities, tags[: batch.num_labels], row) for tags in (batch.targets, predictions))
        same = (true >= 0) & (true == predicted)
        columns.append(torch.stack([true >= 0, predicted >= 0, same], dim=1))
    of_labels = torch.cat(columns, dim=1).float()
    return of_labels.new_zeros(len(batch.lengths), of_labels.shape[1]).index_add_(0, row, of_labels)


def _entities(names: Sequence[str], tags: Tensor, row: Tensor) -> Tensor:
    """Return a number for type and end at the first word of each entity, -1 at other words."""
    kinds = list(dict.fromkeys(name[2:] for name in names))  # PER of B-PER
    facts = [(name[0] in _STARTS, name[0] in _ENDS, name != _OUTSIDE, kinds.index(name[2:])) for name in names]
    starts, ends, inside, kind = torch.tensor(facts, device=tags.device)[tags].unbind(1)
    at = torch.arange(len(tags), device=tags.device)
    apart = (row.roll(1) != row) | (at == 0) | (inside.roll(1) == 0) | (kind.roll(1) != kind) | (ends.roll(1) == 1)
    begins = (inside == 1) & ((starts == 1) | apart)
    continues = (inside == 1) & ~begins
    is_last = ~continues.roll(-1) | (at == len(tags) - 1)
    last = torch.where(is_last, at, len(tags)).flip(0).cummin(0).values.flip(0)
    return torch.where(begins, last * len(kinds) + kind, -1)


def _answer(held_out: HeldOutRows, model: TrainingModel) -> list[Sample]:
    """Predict the tag of each word of each row."""
    assert isinstance(held_out.objective, WordTags)
    names, samples = held_out.objective.names, []
    for i in held_out.indices:
        (row,) = held_out.objective.label(held_out.rows, i, epoch=0)
        predicted = model.logits(torch.from_numpy(row.ids.astype(np.int64))).argmax(-1).cpu()[row.at]
        expected, answer = (" ".join(names[at] for at in tags.tolist()) for tags in (row.targets, predicted))
        samples.append(Sample(prompt=held_out.text(row.ids), expected=expected, answer=answer))
    return samples


@torch.no_grad()
def tags_of_words(lm: Any, ids: Any, first: Any) -> list[str]:
    """Return the tag of each word of a text, from its tokens and the mask of first tokens of words."""
    logits = lm(input_ids=torch.as_tensor(ids, dtype=torch.int64, device=lm.device)[None]).logits[0]
    tags = logits[torch.as_tensor(first, device=lm.device)].argmax(-1).tolist()
    return [lm.config.id2label[at] for at in tags]


TAGGING = Implementation(
    objective=partial(objective_of_labels, WordTags), loss=class_loss, counts=_counts, answers=_answer
)
