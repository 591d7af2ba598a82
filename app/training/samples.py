"""A few held-out rows, completed by the model as it is now."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from app.config.schema import EvalConfig
from app.data.objectives import Classification, LabelledTokens, Objective
from app.data.token_dataset import TokenRows
from app.model.generate import end_ids, generate
from app.model.training_model import TrainingModel
from app.tracking.formatting import Sample
from app.tracking.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Shown:
    """The rows that are shown, and what the model is asked with."""

    rows: TokenRows
    chosen: list[int]
    labels: Objective
    tokenizer: Any
    max_new: int

    def words(self, ids: Any) -> str:
        """Ids as text, without special tokens."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


def sampler(
    config: EvalConfig,
    rows: TokenRows | None,
    labels: Objective,
    trainee: TrainingModel,
    tokenizer: Any,
    record: Recorder,
) -> Callable[[int], None]:
    """A function that shows the answers at a step. Greedy, so that it draws no random number of the run."""
    if rows is None or config.samples == 0:
        return lambda _step: None
    chosen = np.linspace(0, len(rows) - 1, min(config.samples, len(rows))).astype(int).tolist()
    shown = Shown(rows, chosen, labels, tokenizer, config.sample_tokens)
    ask = (
        _classified if isinstance(labels, Classification) else _filled if labels.bidirectional else _answered
    )

    def show(step: int) -> None:
        with trainee.autocast(trainee.language_model.device):
            record.samples(step, ask(shown, trainee))

    return show


def _answered(shown: Shown, trainee: TrainingModel) -> list[Sample]:
    """What the model writes after the prompt of each row."""
    pairs = [_split(shown.rows, i) for i in shown.chosen]
    lm = trainee.language_model
    ends = end_ids(lm, shown.tokenizer)
    answers = generate(lm, [prompt for prompt, _ in pairs], ends, shown.max_new)
    return [
        Sample(prompt=shown.words(prompt), expected=shown.words(expected), answer=shown.words(answer))
        for (prompt, expected), answer in zip(pairs, answers, strict=True)
    ]


def _split(rows: TokenRows, i: int) -> tuple[list[int], list[int]]:
    """The tokens before the first trained one, and that stretch of trained ones."""
    ids, trained = rows.ids(i), rows.loss_mask(i)
    start = int(np.argmax(trained))
    untrained_after = np.flatnonzero(~trained[start:])
    end = start + int(untrained_after[0]) if len(untrained_after) else len(ids)
    return ids[:start].tolist(), ids[start:end].tolist()


def _classified(shown: Shown, trainee: TrainingModel) -> list[Sample]:
    """The likeliest class of each row, and how likely it is to the model."""
    assert isinstance(shown.labels, Classification)
    samples = []
    mode = trainee.training
    trainee.eval()
    for i in shown.chosen:
        row = shown.labels.label(shown.rows, i, epoch=0)
        likelihoods = trainee.likelihoods(*_as_tensors(row))
        best = int(likelihoods.argmax())
        samples.append(
            Sample(
                prompt=shown.words(row.ids),
                expected=shown.rows.class_of(i),
                answer=shown.labels.names[best],
                likelihood=float(likelihoods[best]),
            )
        )
    trainee.train(mode)
    return samples


def _as_tensors(row: LabelledTokens) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ids, and the sides of a pair where there are any."""
    ids = torch.from_numpy(row.ids.astype(np.int64))
    return ids, None if row.second_start < 0 else (torch.arange(len(ids)) >= row.second_start).long()


def _filled(shown: Shown, trainee: TrainingModel) -> list[Sample]:
    """What the model takes the first hidden tokens of each row for."""
    samples = []
    mode = trainee.training
    trainee.eval()
    for i in shown.chosen:
        row = shown.labels.label(shown.rows, i, epoch=0)
        few = slice(shown.max_new)
        found = trainee.predicted(torch.from_numpy(row.ids.astype(np.int64)))[row.at[few]]
        samples.append(
            Sample(
                prompt=shown.tokenizer.decode(row.ids),
                expected=" ".join(shown.words([t]) for t in row.targets[few]),
                answer=" ".join(shown.words([t]) for t in found.tolist()),
            )
        )
    trainee.train(mode)
    return samples
