"""Losses over wanted and unwanted answers, in pairs or one by one: functions of their log-probabilities."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from app.batch import Batch
from app.config.schema import PreferenceConfig

_LOG_HALF = -0.6931471805599453


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


def loss_of_labelled(settings: PreferenceConfig, sums: Tensor, batch: Batch) -> Tensor:
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
