"""Labels of a row: the hidden states that must predict, and their targets."""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from app.data.token_dataset import TokenRows


@dataclass(frozen=True, slots=True)
class LabeledTokens:
    """One document as the model reads it: the hidden state at `at[i]` must predict `targets[i]`."""

    ids: NDArray[np.int32]
    at: NDArray[np.int64]
    targets: NDArray[Any]  # ids of tokens or classes, or numbers
    weights: NDArray[np.float32] | None = None  # how much each target counts; None: 1
    second_start: int = -1  # where the second text of a pair begins, for models with token types
    values: tuple[float, ...] = ()  # what a loss over documents reads of it: its reference log-probability, its label
    mean_of: "LabeledTokens | None" = None  # a second document; the loss reads their mean over the step


class Objective(Protocol):
    """What is asked of the rows of a task."""

    documents_per_row: ClassVar[int] = 1
    over_documents: ClassVar[bool] = False  # whether the loss is a function of whole documents, not a sum over labels
    marked: ClassVar[str] = "tokens in the loss"  # what people read of the marked tokens of a row

    @property
    def bidirectional(self) -> bool:
        """Whether tokens attend to those after them."""
        return False

    def label(self, rows: TokenRows, i: int, epoch: int) -> tuple[LabeledTokens, ...]:
        """The documents of row i with their labels, a pure function of seed, epoch and row."""

    def shown(self, rows: TokenRows, i: int) -> tuple[NDArray[np.float32], str]:
        """For people: how much each token of row i counts in the loss, and what is predicted beside its tokens."""
        weights = rows.weights(i)
        return (rows.loss_mask(i).astype(np.float32) if weights is None else weights), ""


@dataclass(frozen=True, slots=True)
class NextToken(Objective):
    """Every state predicts the token after it, where the loss mask has that one."""

    bidirectional: bool = False

    def label(self, rows: TokenRows, i: int, epoch: int) -> tuple[LabeledTokens, ...]:  # noqa: ARG002  nothing is drawn
        return (label_next_tokens(rows.ids(i), rows.loss_mask(i), rows.weights(i)),)


NEXT_TOKEN = NextToken()


def label_next_tokens(
    ids: NDArray[np.int32], loss_mask: NDArray[np.bool_], weights: NDArray[np.float32] | None = None
) -> LabeledTokens:
    """Label the state before each token of the loss mask with that token."""
    at = np.flatnonzero(loss_mask)
    return LabeledTokens(ids, at - 1, ids[at], None if weights is None else weights[at])
