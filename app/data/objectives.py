"""What a model must predict of the documents of a row: next or masked tokens, tags of words, or a class."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers.models import WordPiece

from app.config.schema import TaskConfig
from app.config.tasks import labelling_of
from app.data.labels import LABELLINGS, parts_of
from app.data.token_dataset import MismatchedRows, TokenRows
from app.data.tokenizer import Tokenizer
from app.errors import ConfigError

# Shares of the drawn tokens that become the mask token or a random one, as in BERT; the others stay as they are.
_MASKED_SHARE, _RANDOM_SHARE = 0.8, 0.1


@dataclass(frozen=True, slots=True)
class LabelledTokens:
    """One document as the model reads it: the hidden state at `at[i]` must predict `targets[i]`."""

    ids: NDArray[np.int32]
    at: NDArray[np.int64]
    targets: NDArray[Any]  # ids of tokens or classes, or numbers
    weights: NDArray[np.float32] | None = None  # how much each target counts; None: 1
    second_start: int = -1  # where the second text of a pair begins, for models with token types
    values: tuple[float, ...] = ()  # what a loss over documents reads of it: its reference log-probability, its label
    mean_of: "LabelledTokens | None" = None  # a second document; the loss reads their mean over the step


class Objective(Protocol):
    """What is asked of the rows of a task."""

    documents_per_row: ClassVar[int] = 1
    over_documents: ClassVar[bool] = False  # whether the loss is a function of whole documents, not a sum over labels
    marked: ClassVar[str] = "to be predicted"  # what people read of the marked tokens of a row

    @property
    def bidirectional(self) -> bool:
        """Whether tokens attend to those after them."""
        return False

    def label(self, rows: TokenRows, i: int, epoch: int) -> tuple[LabelledTokens, ...]:
        """The documents of row i with their labels, a pure function of seed, epoch and row."""

    def shown(self, rows: TokenRows, i: int) -> tuple[NDArray[np.float32], str]:
        """For people: how much each token of row i counts in the loss, and what is predicted beside its tokens."""
        weights = rows.weights(i)
        return (rows.loss_mask(i).astype(np.float32) if weights is None else weights), ""


@dataclass(frozen=True, slots=True)
class NextToken(Objective):
    """Every state predicts the token after it, where the loss mask has that one."""

    bidirectional: bool = False

    def label(self, rows: TokenRows, i: int, epoch: int) -> tuple[LabelledTokens, ...]:  # noqa: ARG002  nothing is drawn
        return (label_next_tokens(rows.ids(i), rows.loss_mask(i), rows.weights(i)),)


NEXT_TOKEN = NextToken()


def label_next_tokens(
    ids: NDArray[np.int32], loss_mask: NDArray[np.bool_], weights: NDArray[np.float32] | None = None
) -> LabelledTokens:
    """Label the state before each token of the loss mask with that token."""
    at = np.flatnonzero(loss_mask)
    return LabelledTokens(ids, at - 1, ids[at], None if weights is None else weights[at])


@dataclass(frozen=True, slots=True)
class MaskedTokens(Objective):
    """A share of each row's tokens, drawn anew in each epoch, is masked and predicted where it stood."""

    marked: ClassVar[str] = "hidden in the first epoch, to be predicted"
    share: float
    mask_id: int
    special: NDArray[np.int64]  # never drawn
    ordinary: NDArray[np.int32]  # random replacements
    seed: int
    continues: NDArray[np.bool_] | None = None  # by id, whether it continues a word; None: tokens are drawn singly
    bidirectional: bool = True

    def label(self, rows: TokenRows, i: int, epoch: int) -> tuple[LabelledTokens, ...]:
        """The draw follows from seed, epoch and row alone: packing and batches change nothing."""
        ids = rows.ids(i)
        free = np.flatnonzero(~np.isin(ids, self.special))
        if not len(free):
            return (LabelledTokens(ids, free, ids[free]),)
        random = np.random.default_rng([self.seed, epoch, i])
        at = self._drawn(ids, free, random)
        draw = random.random(len(at))
        masked = ids.copy()
        masked[at[draw < _MASKED_SHARE]] = self.mask_id
        replaced = at[(draw >= _MASKED_SHARE) & (draw < _MASKED_SHARE + _RANDOM_SHARE)]
        masked[replaced] = random.choice(self.ordinary, len(replaced))
        return (LabelledTokens(masked, at, ids[at]),)

    def _drawn(self, ids: NDArray[np.int32], free: NDArray[np.int64], random: np.random.Generator) -> NDArray[np.int64]:
        """Places of the share of `free`, in order: single tokens, or as many whole words as come nearest to it."""
        count = max(1, round(self.share * len(free)))
        if self.continues is None:
            return np.sort(random.choice(free, count, replace=False))
        begins = ~self.continues[ids[free]] | (np.diff(free, prepend=-2) > 1)
        word = np.cumsum(begins) - 1
        order = random.permutation(word[-1] + 1)
        reached = np.cumsum(np.bincount(word)[order])
        return free[np.isin(word, order[: np.abs(reached - count).argmin() + 1])]

    def shown(self, rows: TokenRows, i: int) -> tuple[NDArray[np.float32], str]:
        (labelled,) = self.label(rows, i, epoch=0)
        drawn = np.zeros(len(labelled.ids), np.float32)
        drawn[labelled.at] = 1.0
        return drawn, ""


@dataclass(frozen=True, slots=True)
class Classification(Objective):
    """One state predicts class or numbers: the first if the model is bidirectional, else the last that is no padding.

    Models of transformers look for that one too.
    """

    names: tuple[str, ...]
    bidirectional: bool = field()  # not the default of an objective
    pad_id: int | None
    labelling: str = "single"
    weights: tuple[float, ...] = ()  # of an answer by its class; (): all 1

    def label(self, rows: TokenRows, i: int, epoch: int) -> tuple[LabelledTokens, ...]:  # noqa: ARG002  nothing is drawn
        targets = LABELLINGS[self.labelling].targets(rows.class_of(i), self.names)
        weights = np.array(self.weights, np.float32)[targets] if self.weights else None
        return (LabelledTokens(rows.ids(i), self.at(rows, i), targets, weights, second_start=rows.second_start(i)),)

    def at(self, rows: TokenRows, i: int) -> NDArray[np.int64]:
        """The states that predict; the first where all tokens are padding."""
        ids = rows.ids(i)
        real = np.flatnonzero(ids != self.pad_id) if self.pad_id is not None else np.arange(len(ids))
        return np.array([0 if self.bidirectional or not len(real) else real[-1]])

    def shown(self, rows: TokenRows, i: int) -> tuple[NDArray[np.float32], str]:
        return np.zeros(len(rows.ids(i)), np.float32), ", ".join(parts_of(rows.class_of(i))) or "none"


@dataclass(frozen=True, slots=True)
class WordTags(Classification):
    """The state of the first token of each word predicts its tag."""

    marked: ClassVar[str] = "the first token of each word, whose tag is to be predicted"

    def at(self, rows: TokenRows, i: int) -> NDArray[np.int64]:
        return np.flatnonzero(rows.loss_mask(i))

    def shown(self, rows: TokenRows, i: int) -> tuple[NDArray[np.float32], str]:
        return rows.loss_mask(i).astype(np.float32), " ".join(parts_of(rows.class_of(i)))


@dataclass(frozen=True, slots=True)
class Comparisons(Objective):
    """Each row is a wanted and an unwanted answer, two documents whose log-probabilities are compared."""

    documents_per_row: ClassVar[int] = 2
    over_documents: ClassVar[bool] = True
    marked: ClassVar[str] = "the wanted answer, then the unwanted one"
    reference: Mapping[int, tuple[float, ...]] = field(default_factory=dict)  # of each document, by its row's hash

    def label(self, rows: TokenRows, i: int, epoch: int) -> tuple[LabelledTokens, ...]:  # noqa: ARG002  nothing is drawn
        parts = (np.split(each, [rows.second_start(i)]) for each in (rows.ids(i), rows.loss_mask(i)))
        sides = tuple(label_next_tokens(ids, loss_mask) for ids, loss_mask in zip(*parts, strict=True))
        if not self.reference:
            return sides
        known = self.reference[int(rows.content_hashes[i])]
        return tuple(replace(side, values=(value,)) for side, value in zip(sides, known, strict=True))


@dataclass(frozen=True, slots=True)
class LabelledAnswers(Objective):
    """Each row is one answer that is wanted or not; beside it goes a mismatched one, which tells how far all moved."""

    over_documents: ClassVar[bool] = True
    marked: ClassVar[str] = "the answer, true where it is wanted"
    reference: Mapping[int, tuple[float, ...]] = field(default_factory=dict)  # by the hash of a row, mismatched or not

    def label(self, rows: TokenRows, i: int, epoch: int) -> tuple[LabelledTokens, ...]:  # noqa: ARG002  nothing is drawn
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


Compared = Comparisons | LabelledAnswers  # objectives whose loss may have a reference


def compared_rows(objective: Compared, rows: TokenRows) -> tuple[TokenRows, ...]:
    """All rows that need a score of the reference model."""
    return (rows, MismatchedRows(rows)) if isinstance(objective, LabelledAnswers) else (rows,)


def _of_labels(
    kind: type[Classification], config: TaskConfig, tokenizer: Tokenizer, _seed: int, bidirectional: bool
) -> Objective:
    labelling, given = labelling_of(config), config.class_weights
    weights = tuple(given) if isinstance(given, list) and LABELLINGS[labelling].weighs_answers else ()
    return kind(tuple(config.labels), bidirectional, tokenizer.pad_token_id, labelling, weights)


def _masked(config: TaskConfig, tokenizer: Tokenizer, seed: int, _bidirectional: bool) -> Objective:
    if tokenizer.mask_token_id is None:
        raise ConfigError(
            "task.kind=masked: the tokenizer has no mask token. Give the tokenizer of an encoder "
            "(model.tokenizer=DIR), or set task=causal."
        )
    special = sorted(set(tokenizer.all_special_ids))
    ordinary = np.setdiff1d(np.array(sorted(tokenizer.get_vocab().values())), special).astype(np.int32)
    continues = _continues_a_word(tokenizer) if config.whole_words else None
    return MaskedTokens(config.mask_share, tokenizer.mask_token_id, np.array(special), ordinary, seed, continues)


def _continues_a_word(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """By id, whether the token continues the word before it, as WordPiece marks it with ##."""
    model = tokenizer.backend_tokenizer.model
    if not isinstance(model, WordPiece):
        raise ConfigError(
            f"task.whole_words=true: the tokenizer is {type(model).__name__}, whose tokens do not show where "
            "words begin. Give a WordPiece tokenizer (model.tokenizer=DIR), or set task.whole_words=false."
        )
    vocabulary = tokenizer.get_vocab()
    found = np.zeros(max(vocabulary.values()) + 1, np.bool_)
    found[[at for piece, at in vocabulary.items() if piece.startswith(model.continuing_subword_prefix)]] = True
    return found


OBJECTIVES: dict[str, Callable[[TaskConfig, Tokenizer, int, bool], Objective]] = {
    "causal": lambda *_: NEXT_TOKEN,
    "masked": _masked,
    "classification": partial(_of_labels, Classification),
    "tokens": partial(_of_labels, WordTags),
    "preference": lambda *_: Comparisons(),
    "preference_label": lambda *_: LabelledAnswers(),
}

# the most labels of so many tokens in so many documents, as a memory plan needs them before any row is read
MOST_LABELS: dict[str, Callable[[TaskConfig, int, int], int]] = {
    # the loss mask is known only from the data
    **dict.fromkeys(("causal", "tokens", "preference", "preference_label"), lambda _config, tokens, _documents: tokens),
    "masked": lambda config, tokens, documents: min(tokens, math.ceil(config.mask_share * tokens) + documents),
    "classification": lambda _config, _tokens, documents: documents,
}


def build_objective(config: TaskConfig, tokenizer: Any, seed: int, *, bidirectional: bool) -> Objective:
    """The objective of a task for a model whose tokens see those after them, or do not."""
    return OBJECTIVES[config.kind](config, tokenizer, seed, bidirectional)
