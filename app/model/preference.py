"""Losses over pairs of a wanted and an unwanted answer: functions of their log-probabilities."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from app.batch import Batch
from app.config.schema import PreferenceConfig

_LOG_HALF = -0.6931471805599453


@dataclass(frozen=True, slots=True)
class Pairs:
    """Both answers of each pair of a batch, [pairs] in float64; `ratios` are log-probabilities less the reference's."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    chosen_ratio: Tensor
    rejected_ratio: Tensor

    @classmethod
    def of(cls, sums: Tensor, batch: Batch) -> "Pairs":
        """From the log-probability of each document: those of a pair follow each other, the wanted one first."""
        assert batch.document_of_label is not None
        tokens = sums.new_zeros(len(sums) + 1)
        tokens = tokens.index_add(0, batch.document_of_label, torch.ones_like(batch.document_of_label).double())[:-1]
        ratios = sums if batch.document_values is None else sums - batch.document_values[:, 0]
        return cls(*(each[side::2] for each in (sums, tokens, ratios) for side in (0, 1)))

    @property
    def chosen_mean(self) -> Tensor:
        """Log-probability of a token of the wanted answer."""
        return self.chosen / self.chosen_tokens

    @property
    def rejected_mean(self) -> Tensor:
        return self.rejected / self.rejected_tokens


@dataclass(frozen=True, slots=True)
class Preference:
    """A loss as a function of the margin: the reward of the wanted answer less that of the unwanted one."""

    margin: Callable[[Pairs, PreferenceConfig], Tensor]
    of_margin: Callable[[Tensor, PreferenceConfig], Tensor]


def loss_of_pairs(settings: PreferenceConfig, sums: Tensor, batch: Batch) -> Tensor:
    """The loss of each pair, `settings.sft` times that of its wanted answer included."""
    pairs, preference = Pairs.of(sums, batch), PREFERENCES[settings.kind]
    loss = preference.of_margin(preference.margin(pairs, settings), settings)
    return loss - settings.sft * pairs.chosen_mean


def _scaled_ratio(pairs: Pairs, settings: PreferenceConfig) -> Tensor:
    return settings.beta * (pairs.chosen_ratio - pairs.rejected_ratio)


def _mean_ratio(pairs: Pairs, _settings: PreferenceConfig) -> Tensor:
    return pairs.chosen_ratio / pairs.chosen_tokens - pairs.rejected_ratio / pairs.rejected_tokens


def _scaled_mean(pairs: Pairs, settings: PreferenceConfig) -> Tensor:
    return settings.beta * (pairs.chosen_mean - pairs.rejected_mean)


def _odds_ratio(pairs: Pairs, _settings: PreferenceConfig) -> Tensor:
    return _log_odds(pairs.chosen_mean) - _log_odds(pairs.rejected_mean)


def _log_odds(log_probability: Tensor) -> Tensor:
    """log(p / (1 - p)), by whichever form of log(1 - e^x) keeps its digits; finite at p = 1."""
    x = log_probability.clamp(max=-torch.finfo(log_probability.dtype).eps)
    return x - torch.where(x > _LOG_HALF, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def _smoothed(margin: Tensor, settings: PreferenceConfig) -> Tensor:
    swapped = settings.label_smoothing
    return -(1 - swapped) * F.logsigmoid(margin) - swapped * F.logsigmoid(-margin)


def _unbiased(margin: Tensor, settings: PreferenceConfig) -> Tensor:
    swapped = settings.label_smoothing
    loss = -(1 - swapped) * F.logsigmoid(margin) + swapped * F.logsigmoid(-margin)
    return loss / (1 - 2 * swapped)


PREFERENCES: dict[str, Preference] = {
    "dpo": Preference(_scaled_ratio, _smoothed),
    "robust": Preference(_scaled_ratio, _unbiased),
    "ipo": Preference(_mean_ratio, lambda margin, own: (margin - 1 / (2 * own.beta)) ** 2),
    "orpo": Preference(_odds_ratio, lambda margin, own: -own.beta * F.logsigmoid(margin)),
    "simpo": Preference(_scaled_mean, lambda margin, own: -F.logsigmoid(margin - own.gamma)),
}
