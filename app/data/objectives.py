"""What a model must predict of a row: the next token of each, tokens that were hidden from it, or its class."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from app.config.schema import TaskConfig
from app.data.token_dataset import TokenRows
from app.data.tokenizer import Tokenizer
from app.errors import ConfigError

_HIDDEN, _REPLACED = 0.8, 0.1  # of the chosen tokens, as in BERT; the others stay and must be predicted too


@dataclass(frozen=True, slots=True)
class LabelledTokens:
    """One row as the model reads it: the state at `at[i]` must predict `targets[i]`."""

    ids: NDArray[np.int32]
    at: NDArray[np.int64]
    targets: NDArray[np.int32]
    weights: NDArray[np.float32] | None = None  # how much each target counts; None: 1
    second_start: int = -1  # where the second side of a pair begins, for models that are told


class Objective(Protocol):
    """How a task labels rows."""

    @property
    def bidirectional(self) -> bool:
        """Whether tokens see those after them, so that padding must be kept from them."""

    def label(self, rows: TokenRows, i: int, epoch: int) -> LabelledTokens:
        """Row i; the same whenever it is asked for the same epoch."""


@dataclass(frozen=True, slots=True)
class NextToken:
    """Every state predicts the token after it, where that one is trained."""

    bidirectional: bool = False

    def label(self, rows: TokenRows, i: int, epoch: int) -> LabelledTokens:  # noqa: ARG002  nothing is drawn
        """The row as it is."""
        return label_next_tokens(rows.ids(i), rows.loss_mask(i), rows.weights(i))


NEXT_TOKEN = NextToken()


def label_next_tokens(
    ids: NDArray[np.int32], trained: NDArray[np.bool_], weights: NDArray[np.float32] | None = None
) -> LabelledTokens:
    """The state before a trained token predicts it."""
    at = np.flatnonzero(trained)
    return LabelledTokens(ids, at - 1, ids[at], None if weights is None else weights[at])


@dataclass(frozen=True, slots=True)
class MaskedTokens:
    """A share of each row's tokens is drawn anew in each epoch, hidden, and predicted where it stood."""

    share: float
    mask_id: int
    special: NDArray[np.int64]  # never drawn
    ordinary: NDArray[np.int32]  # what a token is replaced by
    seed: int
    bidirectional: bool = True

    def label(self, rows: TokenRows, i: int, epoch: int) -> LabelledTokens:
        """The draw follows from seed, epoch and row alone: packing and batches change nothing."""
        ids = rows.ids(i)
        free = np.flatnonzero(~np.isin(ids, self.special))
        if not len(free):
            return LabelledTokens(ids, free, ids[free])
        random = np.random.default_rng([self.seed, epoch, i])
        at = np.sort(random.choice(free, max(1, round(self.share * len(free))), replace=False))
        return LabelledTokens(self._hidden(ids, at, random), at, ids[at])

    def _hidden(
        self, ids: NDArray[np.int32], at: NDArray[np.int64], random: np.random.Generator
    ) -> NDArray[np.int32]:
        fate = random.random(len(at))
        seen = ids.copy()
        seen[at[fate < _HIDDEN]] = self.mask_id
        replaced = at[(fate >= _HIDDEN) & (fate < _HIDDEN + _REPLACED)]
        seen[replaced] = random.choice(self.ordinary, len(replaced))
        return seen


@dataclass(frozen=True, slots=True)
class Classification:
    """The state of one token predicts the class: of the first where tokens see those after them, else of the last.

    Of the last one that is no padding, to be exact: models of transformers look for that.
    """

    names: tuple[str, ...]
    bidirectional: bool
    pad_id: int | None

    def label(self, rows: TokenRows, i: int, epoch: int) -> LabelledTokens:  # noqa: ARG002  nothing is drawn
        """The row as it is."""
        ids = rows.ids(i)
        at = 0 if self.bidirectional else self.last(ids)
        target = self.names.index(rows.class_of(i))
        return LabelledTokens(
            ids, np.array([at]), np.array([target], np.int32), second_start=rows.second_start(i)
        )

    def last(self, ids: NDArray[np.int32]) -> int:
        """The place of the last token; the first one's where all are padding."""
        real = np.flatnonzero(ids != self.pad_id) if self.pad_id is not None else np.arange(len(ids))
        return int(real[-1]) if len(real) else 0


def _causal(_config: TaskConfig, _tokenizer: Tokenizer, _seed: int, _both_ways: bool) -> Objective:
    return NEXT_TOKEN


def _classes(config: TaskConfig, tokenizer: Tokenizer, _seed: int, bidirectional: bool) -> Objective:
    return Classification(tuple(config.labels), bidirectional, tokenizer.pad_token_id)


def _masked(config: TaskConfig, tokenizer: Tokenizer, seed: int, _both_ways: bool) -> Objective:
    if tokenizer.mask_token_id is None:
        raise ConfigError(
            "task.kind=masked: the tokenizer has no mask token. Give the tokenizer of an encoder "
            "(model.tokenizer=DIR), or set task=causal."
        )
    special = sorted(set(tokenizer.all_special_ids))
    ordinary = np.setdiff1d(np.array(sorted(tokenizer.get_vocab().values())), special).astype(np.int32)
    return MaskedTokens(config.mask_share, tokenizer.mask_token_id, np.array(special), ordinary, seed)


OBJECTIVES: dict[str, Callable[[TaskConfig, Tokenizer, int, bool], Objective]] = {
    "causal": _causal,
    "masked": _masked,
    "classification": _classes,
}


def build_objective(config: TaskConfig, tokenizer: Any, seed: int, *, bidirectional: bool) -> Objective:
    """Of a run's task, and a model whose tokens see those after them or do not."""
    return OBJECTIVES[config.kind](config, tokenizer, seed, bidirectional)


def read(
    rows: TokenRows, units: Sequence[NDArray[np.int64]], labels: Objective, epoch: int
) -> list[LabelledTokens]:
    """The rows of `units`, one after another."""
    return [labels.label(rows, int(i), epoch) for unit in units for i in unit]
