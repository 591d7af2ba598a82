"""Preference tuning: losses over chosen/rejected pairs, or over single answers with a label.

A loss is a function of log-probabilities and rewards of answers, an entry of `PREFERENCES` or `LABEL_PREFERENCES`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from app.batch import Batch
from app.config.schema import PreferenceConfig, RunConfig
from app.data.objectives import LabeledTokens, Objective, label_next_tokens
from app.data.token_dataset import MismatchedRows, TokenRows
from app.model.losses import log_probabilities, over_documents
from app.model.training_model import TrainingModel
from app.tasks.causal import answer
from app.tasks.interface import LOSS, NUM_BASIC, WEIGHT, Counts, HeldOutRows, Implementation, Sums
from app.tracking.formatting import Sample

_LOG_HALF = -0.6931471805599453
_TIE = 1e-3  # a smaller margin is rounding error: before step 1 the model equals its reference


@dataclass(frozen=True, slots=True)
class Comparisons(Objective):
    """Rows with a chosen and a rejected answer, two documents whose log-probabilities are compared."""

    documents_per_row: ClassVar[int] = 2
    over_documents: ClassVar[bool] = True
    marked: ClassVar[str] = "the chosen answer, then the rejected one"
    reference: Mapping[int, tuple[float, ...]] = field(default_factory=dict)  # of each document, by hash of the row

    def label(self, rows: TokenRows, i: int, epoch: int) -> tuple[LabeledTokens, ...]:  # noqa: ARG002  nothing is drawn
        parts = (np.split(values, [rows.second_start(i)]) for values in (rows.ids(i), rows.loss_mask(i)))
        sides = tuple(label_next_tokens(ids, loss_mask) for ids, loss_mask in zip(*parts, strict=True))
        if not self.reference:
            return sides
        reference = self.reference[int(rows.content_hashes[i])]
        return tuple(replace(side, values=(value,)) for side, value in zip(sides, reference, strict=True))


@dataclass(frozen=True, slots=True)
class LabeledAnswers(Objective):
    """Rows with one labeled answer, and a mismatched answer for the KL estimate."""

    over_documents: ClassVar[bool] = True
    marked: ClassVar[str] = "the answer, true if it is good"
    reference: Mapping[int, tuple[float, ...]] = field(default_factory=dict)  # by row hash, including mismatched rows

    def label(self, rows: TokenRows, i: int, epoch: int) -> tuple[LabeledTokens, ...]:  # noqa: ARG002  nothing is drawn
        answer = label_next_tokens(rows.ids(i), rows.loss_mask(i))
        if not self.reference:
            return (answer,)
        others = MismatchedRows(rows)
        mismatched = label_next_tokens(others.ids(i), others.loss_mask(i))
        mismatched = replace(mismatched, values=self.reference[others.content_hash(i)])
        (reference,) = self.reference[int(rows.content_hashes[i])]
        return (replace(answer, values=(reference, float(rows.class_of(i) == "true")), mean_of=mismatched),)

    def shown(self, rows: TokenRows, i: int) -> tuple[NDArray[np.float32], str]:
        return rows.loss_mask(i).astype(np.float32), rows.class_of(i)


Compared = Comparisons | LabeledAnswers  # objectives whose loss may have a reference model


def compared_rows(objective: Compared, rows: TokenRows) -> tuple[TokenRows, ...]:
    """Return all rows that the reference model must score."""
    return (rows, MismatchedRows(rows)) if isinstance(objective, LabeledAnswers) else (rows,)


# ---- losses


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of a batch, [answers] in float64; `ratio` is log-probability minus that of the reference."""

    log_probability: Tensor
    tokens: Tensor
    ratio: Tensor

    @classmethod
    def of(cls, sums: Tensor, batch: Batch) -> "Answers":
        assert batch.document_of_label is not None
        tokens = sums.new_zeros(len(sums) + 1)
        tokens = tokens.index_add(0, batch.document_of_label, torch.ones_like(batch.document_of_label).double())[:-1]
        return cls(sums, tokens, sums if batch.document_values is None else sums - batch.document_values[:, 0])

    @property
    def mean(self) -> Tensor:
        """Mean log-probability per token."""
        return self.log_probability / self.tokens

    def pairs(self) -> tuple["Answers", "Answers"]:
        """Return the chosen and the rejected answers, which alternate in the batch."""
        chosen, rejected = ([getattr(self, field.name)[side::2] for field in fields(self)] for side in (0, 1))
        return Answers(*chosen), Answers(*rejected)


Reward = Callable[[Answers, PreferenceConfig], Tensor]


@dataclass(frozen=True, slots=True)
class Preference:
    """Loss as a function of the margin: chosen reward minus rejected reward."""

    reward: Reward
    of_margin: Callable[[Tensor, PreferenceConfig], Tensor]


@dataclass(frozen=True, slots=True)
class LabelPreference:
    """Loss of single answers, from their rewards, labels and the mean over the step."""

    reward: Reward
    of_rewards: Callable[[Tensor, Tensor, Tensor, PreferenceConfig], Tensor]


def loss_of_pairs(settings: PreferenceConfig, sums: Tensor, batch: Batch) -> Tensor:
    """Return the loss of each pair, including `settings.sft` times the loss of the chosen answer."""
    chosen, rejected = Answers.of(sums, batch).pairs()
    preference = PREFERENCES[settings.kind]
    margin = preference.reward(chosen, settings) - preference.reward(rejected, settings)
    return preference.of_margin(margin, settings) - settings.sft * chosen.mean


def loss_of_labeled(settings: PreferenceConfig, sums: Tensor, batch: Batch) -> Tensor:
    """Return the loss of each answer."""
    preference, mean = LABEL_PREFERENCES[settings.kind], batch.step_mean
    rewards = preference.reward(Answers.of(sums, batch), settings)
    return preference.of_rewards(rewards, is_good(batch), rewards.new_zeros(()) if mean is None else mean, settings)


def log_ratios(sums: Tensor, batch: Batch) -> Tensor:
    """Return log-ratios to the reference; their mean over mismatched answers estimates the KL divergence."""
    return Answers.of(sums, batch).ratio


def is_good(batch: Batch) -> Tensor:
    """Return whether each answer is labeled good; all True without reference values, before training starts."""
    if batch.document_values is None:
        return torch.ones(len(batch.lengths), dtype=torch.bool, device=batch.ids.device)
    return batch.document_values[:, 1] > 0


def _scaled_ratio(answers: Answers, settings: PreferenceConfig) -> Tensor:
    return settings.beta * answers.ratio


def _log_odds(answers: Answers, _settings: PreferenceConfig) -> Tensor:
    """Return log(p / (1 - p)) with the accurate form of log(1 - e^x); finite at p = 1."""
    x = answers.mean.clamp(max=-torch.finfo(answers.mean.dtype).eps)
    return x - torch.where(x > _LOG_HALF, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def _smoothed(margin: Tensor, settings: PreferenceConfig) -> Tensor:
    swapped = settings.label_smoothing
    return -(1 - swapped) * F.logsigmoid(margin) - swapped * F.logsigmoid(-margin)


def _unbiased(margin: Tensor, settings: PreferenceConfig) -> Tensor:
    swapped = settings.label_smoothing
    loss = -(1 - swapped) * F.logsigmoid(margin) + swapped * F.logsigmoid(-margin)
    return loss / (1 - 2 * swapped)


def _kahneman_tversky(rewards: Tensor, good: Tensor, mean_ratio: Tensor, settings: PreferenceConfig) -> Tensor:
    gain = rewards - settings.beta * mean_ratio.clamp(min=0)
    loss = settings.desirable * torch.sigmoid(-gain), settings.undesirable * torch.sigmoid(gain)
    return torch.where(good, *loss)


PREFERENCES: dict[str, Preference] = {
    "dpo": Preference(_scaled_ratio, _smoothed),
    "robust": Preference(_scaled_ratio, _unbiased),
    "ipo": Preference(
        lambda answers, _settings: answers.ratio / answers.tokens,
        lambda margin, settings: (margin - 1 / (2 * settings.beta)) ** 2,
    ),
    "orpo": Preference(_log_odds, lambda margin, settings: -settings.beta * F.logsigmoid(margin)),
    "simpo": Preference(
        lambda answers, settings: settings.beta * answers.mean,
        lambda margin, settings: -F.logsigmoid(margin - settings.gamma),
    ),
}
LABEL_PREFERENCES: dict[str, LabelPreference] = {"kto": LabelPreference(_scaled_ratio, _kahneman_tversky)}


# ---- metrics


def _count_pairs(run: RunConfig) -> Counts:
    correct, decided, exact, margin, *sides = range(NUM_BASIC, NUM_BASIC + 10)
    ratios = {
        "eval_loss": (LOSS, WEIGHT),
        "pair_accuracy": (correct, decided),
        "exact_match": (exact, WEIGHT),
        "reward_margin": (margin, WEIGHT),
        **_ratios_of_side("chosen", (*sides[:3], WEIGHT)),
        **_ratios_of_side("rejected", (*sides[3:], WEIGHT)),
    }
    return Counts(ratios, task_columns=partial(_compared, run.preference), num_task_columns=10)


def _ratios_of_side(side: str, columns: Sequence[int]) -> dict[str, tuple[int, int]]:
    reward, log_probability, tokens, answers = columns
    return {f"{side}_reward": (reward, answers), f"{side}_log_probability": (log_probability, tokens)}


def _compared(settings: PreferenceConfig, batch: Batch, losses: Tensor, predictions: Tensor) -> Tensor:
    """Return accuracy, exact match and margin of each pair, and reward, log-probability and tokens of both answers."""
    sides = Answers.of(log_probabilities(losses, batch), batch).pairs()
    rewards = [PREFERENCES[settings.kind].reward(side, settings) for side in sides]
    margin = rewards[0] - rewards[1]
    decided = margin.abs() > _TIE
    basic = torch.stack([(margin > 0) & decided, decided, _exact_matches(batch, predictions)[0::2], margin], dim=1)
    by_side = [[reward, side.log_probability, side.tokens] for reward, side in zip(rewards, sides, strict=True)]
    return torch.cat([basic, *(torch.stack(columns, dim=1) for columns in by_side)], dim=1)


def _exact_matches(batch: Batch, predictions: Tensor) -> Tensor:
    """Return whether greedy decoding generates the trained tokens of each document."""
    wrong = log_probabilities((predictions != batch.targets).double(), batch)  # negative count
    return (wrong == 0).double()


def _count_labeled(run: RunConfig) -> Counts:
    sides = [range(start, start + 4) for start in (NUM_BASIC, NUM_BASIC + 4)]
    exact = NUM_BASIC + 8
    ratios = {
        "eval_loss": (LOSS, WEIGHT),
        "exact_match": (exact, sides[0][-1]),
        **_ratios_of_side("chosen", sides[0]),
        **_ratios_of_side("rejected", sides[1]),
    }
    return Counts(ratios, _margin_of_means, task_columns=partial(_judged, run.preference), num_task_columns=9)


def _margin_of_means(sums: Sums) -> dict[str, NDArray[np.float64]]:
    chosen, _, _, num_chosen, rejected, _, _, num_rejected = (sums[..., NUM_BASIC + at] for at in range(8))
    return {"reward_margin": chosen / num_chosen - rejected / num_rejected}


def _judged(settings: PreferenceConfig, batch: Batch, losses: Tensor, predictions: Tensor) -> Tensor:
    """Return reward, log-probability, tokens and count of good and of bad answers, and exact match of good ones."""
    answers, good = Answers.of(log_probabilities(losses, batch), batch), is_good(batch)
    reward = LABEL_PREFERENCES[settings.kind].reward(answers, settings)
    columns = torch.stack([reward, answers.log_probability, answers.tokens, torch.ones_like(reward)], dim=1)
    exact = _exact_matches(batch, predictions) * good
    return torch.cat([columns * good[:, None], columns * ~good[:, None], exact[:, None]], dim=1)


# ---- answers


def _answer_chosen(held_out: HeldOutRows, model: TrainingModel) -> list[Sample]:
    """Generate for prompts whose answer is labeled good."""
    good = np.flatnonzero(held_out.rows.where_label(lambda label: label == "true"))
    count = min(len(held_out.indices), len(good))
    chosen = good[np.linspace(0, len(good) - 1, count).astype(int)].tolist() if count else []
    return answer(replace(held_out, indices=chosen), model) if chosen else []


PAIRS = Implementation(
    objective=lambda *_: Comparisons(),
    loss=lambda _task, preference: over_documents(partial(loss_of_pairs, preference)),
    counts=_count_pairs,
    answers=answer,
)
LABELED_ANSWERS = Implementation(
    objective=lambda *_: LabeledAnswers(),
    loss=lambda _task, preference: over_documents(partial(loss_of_labeled, preference), log_ratios),
    counts=_count_labeled,
    answers=_answer_chosen,
)
