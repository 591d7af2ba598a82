"""Masked language modeling of plain text."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers.models import WordPiece

from app.config.schema import TaskConfig
from app.data.objectives import LabeledTokens, Objective
from app.data.token_dataset import TokenRows
from app.data.tokenizer import Tokenizer
from app.errors import ConfigError
from app.model.losses import TOKEN_LOSS
from app.model.training_model import TrainingModel
from app.tasks.causal import count_tokens
from app.tasks.interface import HeldOutRows, Implementation
from app.tracking.formatting import Sample

# Shares of the selected tokens replaced by the mask token or a random one, as in BERT; the others are unchanged.
_MASKED_SHARE, _RANDOM_SHARE = 0.8, 0.1


@dataclass(frozen=True, slots=True)
class MaskedTokens(Objective):
    """Prediction of a masked share of the tokens of each row, selected again in each epoch."""

    marked: ClassVar[str] = "masked tokens of the first epoch"
    share: float
    mask_id: int
    special: NDArray[np.int64]  # never selected
    ordinary: NDArray[np.int32]  # random replacements
    seed: int
    # by token ID, whether the token continues a word; None: tokens are selected individually
    continues: NDArray[np.bool_] | None = None
    bidirectional: bool = True

    def label(self, rows: TokenRows, i: int, epoch: int) -> tuple[LabeledTokens, ...]:
        """Return the masked row; the selection depends only on seed, epoch and row, not on packing or batches."""
        ids = rows.ids(i)
        free = np.flatnonzero(~np.isin(ids, self.special))
        if not len(free):
            return (LabeledTokens(ids, free, ids[free]),)
        random = np.random.default_rng([self.seed, epoch, i])
        at = self._drawn(ids, free, random)
        draw = random.random(len(at))
        masked = ids.copy()
        masked[at[draw < _MASKED_SHARE]] = self.mask_id
        replaced = at[(draw >= _MASKED_SHARE) & (draw < _MASKED_SHARE + _RANDOM_SHARE)]
        masked[replaced] = random.choice(self.ordinary, len(replaced))
        return (LabeledTokens(masked, at, ids[at]),)

    def _drawn(self, ids: NDArray[np.int32], free: NDArray[np.int64], random: np.random.Generator) -> NDArray[np.int64]:
        """Return the selected positions of `free` in order: single tokens, or whole words closest to the share."""
        count = max(1, round(self.share * len(free)))
        if self.continues is None:
            return np.sort(random.choice(free, count, replace=False))
        begins = ~self.continues[ids[free]] | (np.diff(free, prepend=-2) > 1)
        word = np.cumsum(begins) - 1
        order = random.permutation(word[-1] + 1)
        reached = np.cumsum(np.bincount(word)[order])
        return free[np.isin(word, order[: np.abs(reached - count).argmin() + 1])]

    def shown(self, rows: TokenRows, i: int) -> tuple[NDArray[np.float32], str]:
        (labeled,) = self.label(rows, i, epoch=0)
        drawn = np.zeros(len(labeled.ids), np.float32)
        drawn[labeled.at] = 1.0
        return drawn, ""


def _objective(config: TaskConfig, tokenizer: Tokenizer, seed: int, _bidirectional: bool) -> Objective:
    if tokenizer.mask_token_id is None:
        raise ConfigError(
            "task.kind=masked: the tokenizer has no mask token. Use the tokenizer of an encoder "
            "(model.tokenizer=DIR), or set task=causal."
        )
    special = sorted(set(tokenizer.all_special_ids))
    ordinary = np.setdiff1d(np.array(sorted(tokenizer.get_vocab().values())), special).astype(np.int32)
    continues = _continues_a_word(tokenizer) if config.whole_words else None
    return MaskedTokens(config.mask_share, tokenizer.mask_token_id, np.array(special), ordinary, seed, continues)


def _continues_a_word(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Return by token ID whether the token continues the previous word, marked by ## in WordPiece."""
    model = tokenizer.backend_tokenizer.model
    if not isinstance(model, WordPiece):
        raise ConfigError(
            f"task.whole_words=true: the tokenizer is {type(model).__name__}, whose tokens do not show where "
            "words begin. Use a WordPiece tokenizer (model.tokenizer=DIR), or set task.whole_words=false."
        )
    vocabulary = tokenizer.get_vocab()
    continues = np.zeros(max(vocabulary.values()) + 1, np.bool_)
    continues[[at for piece, at in vocabulary.items() if piece.startswith(model.continuing_subword_prefix)]] = True
    return continues


def _most_labels(config: TaskConfig, tokens: int, documents: int) -> int:
    return min(tokens, math.ceil(config.mask_share * tokens) + documents)


def _answer(held_out: HeldOutRows, model: TrainingModel) -> list[Sample]:
    """Predict the first masked tokens of each row."""
    samples = []
    for i in held_out.indices:
        (row,) = held_out.objective.label(held_out.rows, i, epoch=0)
        few = slice(held_out.max_new_tokens)
        predicted = model.logits(torch.from_numpy(row.ids.astype(np.int64))).argmax(-1).cpu()[row.at[few]]
        samples.append(
            Sample(
                prompt=held_out.tokenizer.decode(row.ids),
                expected=" ".join(held_out.text([t]) for t in row.targets[few]),
                answer=" ".join(held_out.text([t]) for t in predicted.tolist()),
            )
        )
    return samples


MASKED = Implementation(
    objective=_objective,
    loss=lambda _task, _preference: TOKEN_LOSS,
    counts=count_tokens,
    answers=_answer,
    most_labels=_most_labels,
)
