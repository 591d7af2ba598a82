"""Preference tuning: losses over chosen and rejected answers, in pairs or one by one with a label.

A loss is a function of the answers' log-probabilities and rewards: an entry of `PREFERENCES` or `LABEL_PREFERENCES`.
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
_TIE = 1e-3  # a smaller margin is rounding: before step 1 the model is its own reference


@dataclass(frozen=True, slots=True)
class Comparisons(Objective):
    """Each row is a wanted and an unwanted answer, two documents whose log-probabilities are compared."""

    documents_per_row: ClassVar[int] = 2
    over_documents: ClassVar[bool] = True
    marked: ClassVar[str] = "the chosen answer, then the rejected one"
    reference: Mapping[int, tuple[float, ...]] = field(default_factory=dict)  # of each document, by its row's hash

    def label(self, rows: TokenRows, i: int, epoch: int) -> tuple[LabeledTokens, ...]:  # noqa: ARG002  nothing is drawn
        parts = (np.split(each, [rows.second_start(i)]) for each in (rows.ids(i), rows.loss_mask(i)))
        sides = tuple(label_next_tokens(ids, loss_mask) for ids, loss_mask in zip(*parts, strict=True))
        if not self.reference:
            return sides
        known = self.reference[int(rows.content_hashes[i])]
        return tuple(replace(side, values=(value,)) for side, value in zip(sides, known, strict=True))


@dataclass(frozen=True, slots=True)
class LabeledAnswers(Objective):
    """Each row is one answer that is wanted or not; beside it goes a mismatched one, which tells how far all moved."""

    over_documents: ClassVar[bool] = True
    marked: ClassVar[str] = "the answer, true if it is good"
    reference: Mapping[int, tuple[float, ...]] = field(default_factory=dict)  # by the hash of a row, mismatched or not

    def label(self, rows: TokenRows, i: int, epoch: int) -> tuple[LabeledTokens, ...]:  # noqa: ARG002  nothing is drawn
        answer = label_next_tokens(rows.ids(i), rows.loss_mask(i))
        if not self.reference:
            return (answer,)
        others = MismatchedRows(rows)
        mismatched = label_next_tokens(others.ids(i), others.loss_mask(i))
        mismatched = replace(mismatched, values=self.reference[others.content_hash(i)])
        (known,) = self.reference[int(rows.content_hashes[i])]
        return (replace(answer, values=(known, float(rows.class_of(i) == "true")), mean_of=mismatched),)

    def shown(self, rows: TokenRows, i: int) -> tuple[NDArray[np.float32], str]:
        return rows.loss_mask(i).astype(np.float32), rows.class_of(i)


Compared = Comparisons | LabeledAnswers  # objectives whose loss may have a reference


def compared_rows(objective: Compared, rows: TokenRows) -> tuple[TokenRows, ...]:
    """All rows that need a score of the reference model."""
    return (rows, MismatchedRows(rows)) if isinstance(objective, LabeledAnswers) else (rows,)


# ---- losses


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of a batch, [answers] in float64; `ratio` is the log-probability less the reference's."""

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
        """Log-probability of a token."""
        return self.log_probability / self.tokens

    def pairs(self) -> tuple["Answers", "Answers"]:
        """The wanted ones and the unwanted ones: those of a pair follow each other."""
        chosen, rejected = ([getattr(self, field.name)[side::2] for field in fields(self)] for side in (0, 1))
        return Answers(*chosen), Answers(*rejected)


Reward = Callable[[Answers, PreferenceConfig], Tensor]


@dataclass(frozen=True, slots=True)
class Preference:
    """A loss as a function of the margin: the reward of the wanted answer less that of the unwanted one."""

    reward: Reward
    of_margin: Callable[[Tensor, PreferenceConfig], Tensor]


@dataclass(frozen=True, slots=True)
class LabelPreference:
    """A loss of single answers, from their rewards, whether each is wanted, and the mean that the step asks for."""

    reward: Reward
    of_rewards: Callable[[Tensor, Tensor, Tensor, PreferenceConfig], Tensor]


def loss_of_pairs(settings: PreferenceConfig, sums: Tensor, batch: Batch) -> Tensor:
    """The loss of each pair, `settings.sft` times that of its wanted answer included."""
    chosen, rejected = Answers.of(sums, batch).pairs()
    preference = PREFERENCES[settings.kind]
    margin = preference.reward(chosen, settings) - preference.reward(rejected, settings)
    return preference.of_margin(margin, settings) - settings.sft * chosen.mean


def loss_of_labeled(settings: PreferenceConfig, sums: Tensor, batch: Batch) -> Tensor:
    """The loss of each answer."""
    preference, mean = LABEL_PREFERENCES[settings.kind], batch.step_mean
    rewards = preference.reward(Answers.of(sums, batch), settings)
    return preference.of_rewards(rewards, is_wanted(batch), rewards.new_zeros(()) if mean is None else mean, settings)


def log_ratios(sums: Tensor, batch: Batch) -> Tensor:
    """Log-probabilities less the reference's: over mismatched answers, their mean estimates the KL divergence."""
    return Answers.of(sums, batch).ratio


def is_wanted(batch: Batch) -> Tensor:
    """Whether each answer is; all are before there is a reference, when nothing is learnt yet."""
    if batch.document_values is None:
        return torch.ones(len(batch.lengths), dtype=torch.bool, device=batch.ids.device)
    return batch.document_values[:, 1] > 0


def _scaled_ratio(answers: Answers, settings: PreferenceConfig) -> Tensor:
    return settings.beta * answers.ratio


def _log_odds(answers: Answers, _settings: PreferenceConfig) -> Tensor:
    """log(p / (1 - p)), by whichever form of log(1 - e^x) keeps its digits; finite at p = 1."""
    x = answers.mean.clamp(max=-torch.finfo(answers.mean.dtype).eps)
    return x - torch.where(x > _LOG_HALF, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def _smoothed(margin: Tensor, settings: PreferenceConfig) -> Tensor:
    swapped = settings.label_smoothing
    return -(1 - swapped) * F.logsigmoid(margin) - swapped * F.logsigmoid(-margin)


def _unbiased(margin: Tensor, settings: PreferenceConfig) -> Tensor:
    swapped = settings.label_smoothing
    loss = -(1 - swapped) * F.logsigmoid(margin) + swapped * F.logsigmoid(-margin)
    return loss / (1 - 2 * swapped)


def _kahneman_tversky(rewards: Tensor, wanted: Tensor, mean_ratio: Tensor, settings: PreferenceConfig) -> Tensor:
    gain = rewards - settings.beta * mean_ratio.clamp(min=0)
    loss = settings.desirable * torch.sigmoid(-gain), settings.undesirable * torch.sigmoid(gain)
    return torch.where(wanted, *loss)


PREFERENCES: dict[str, Preference] = {
    "dpo": Preference(_scaled_ratio, _smoothed),
    "robust": Preference(_scaled_ratio, _unbiased),
    "ipo": Preference(
        lambda answers, _own: answers.ratio / answers.tokens, lambda margin, own: (margin - 1 / (2 * own.beta)) ** 2
    ),
    "orpo": Preference(_log_odds, lambda margin, own: -own.beta * F.logsigmoid(margin)),
    "simpo": Preference(
        lambda answers, own: own.beta * answers.mean, lambda margin, own: -F.logsigmoid(margin - own.gamma)
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
    return Counts(ratios, own=partial(_compared, run.preference), num_own=10)


def _ratios_of_side(side: str, columns: Sequence[int]) -> dict[str, tuple[int, int]]:
    reward, log_probability, tokens, answers = columns
    return {f"{side}_reward": (reward, answers), f"{side}_log_probability": (log_probability, tokens)}


def _compared(settings: PreferenceConfig, batch: Batch, losses: Tensor, chosen: Tensor) -> Tensor:
    """Whether the wanted answer has the larger reward, whether it would be written, by how much its reward is larger,
    and reward, log-probability and tokens of both.
    """
    sides = Answers.of(log_probabilities(losses, batch), batch).pairs()
    rewards = [PREFERENCES[settings.kind].reward(side, settings) for side in sides]
    margin = rewards[0] - rewards[1]
    decided = margin.abs() > _TIE
    basic = torch.stack([(margin > 0) & decided, decided, _would_be_written(batch, chosen)[0::2], margin], dim=1)
    own = [[reward, side.log_probability, side.tokens] for reward, side in zip(rewards, sides, strict=True)]
    return torch.cat([basic, *(torch.stack(each, dim=1) for each in own)], dim=1)


def _would_be_written(batch: Batch, chosen: Tensor) -> Tensor:
    """Whether greedy decoding writes each document's trained tokens."""
    wrong = log_probabilities((chosen != batch.targets).double(), batch)  # minus their number
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
    return Counts(ratios, _margin_of_means, own=partial(_judged, run.preference), num_own=9)


def _margin_of_means(sums: Sums) -> dict[str, NDArray[np.float64]]:
    wanted, _, _, many, unwanted, _, _, others = (sums[..., NUM_BASIC + at] for at in range(8))
    return {"reward_margin": wanted / many - unwanted / others}


def _judged(settings: PreferenceConfig, batch: Batch, losses: Tensor, chosen: Tensor) -> Tensor:
    """Reward, log-probability, tokens and number of wanted answers, the same of unwanted ones, and whether a wanted one
    would be written.
    """
    answers, wanted = Answers.of(log_probabilities(losses, batch), batch), is_wanted(batch)
    reward = LABEL_PREFERENCES[settings.kind].reward(answers, settings)
    each = torch.stack([reward, answers.log_probability, answers.tokens, torch.ones_like(reward)], dim=1)
    exact = _would_be_written(batch, chosen) * wanted
    return torch.cat([each * wanted[:, None], each * ~wanted[:, None], exact[:, None]], dim=1)


# ---- answers


def _answer_chosen(held_out: HeldOutRows, model: TrainingModel) -> list[Sample]:
    """Generate from prompts whose answer in the rows is wanted."""
    wanted = np.flatnonzero(held_out.rows.where_label(lambda label: label == "true"))
    count = min(len(held_out.indices), len(wanted))
    chosen = wanted[np.linspace(0, len(wanted) - 1, count).astype(int)].tolist() if count else []
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
