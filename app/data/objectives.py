"""Labels of a row: the predicting hidden states and their targets."""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from app.data.token_dataset import TokenRows


@dataclass(frozen=True, slots=True)
class LabeledTokens:
    """One document as model input: the hidden state at `at[i]` must predict `targets[i]`."""

    ids: NDArray[np.int32]
    at: NDArray[np.int64]
    targets: NDArray[Any]  # IDs of tokens or classes, or numbers
    weights: NDArray[np.float32] | None = None  # of each target; None: 1
    second_start: int = -1  # start of the second text of a pair, for models with token types
    values: tuple[float, ...] = ()  # inputs of a loss over documents: reference log-probability, label
    mean_of: "LabeledTokens | None" = None  # a second document, whose mean over the step the loss reads


class Objective(Protocol):
    """Training objective of a task."""

    documents_per_row: ClassVar[int] = 1
    # whether the loss is a function of whole documents instead of a sum over labels
    over_documents: ClassVar[bool] = False
    marked: ClassVar[str] = "tokens in the loss"  # description of the highlighted tokens of a row

    @property
    def bidirectional(self) -> bool:
        """Whether attention is bidirectional."""
        return False

    def label(self, rows: TokenRows, i: int, epoch: int) -> tuple[LabeledTokens, ...]:
        """Return the documents of row i with their labels, a pure function of seed, epoch and row."""

    def shown(self, rows: TokenRows, i: int) -> tuple[NDArray[np.float32], str]:
        """Return the loss weight of each token of row i, and the predicted label as text."""
        weights = rows.weights(i)
        return (rows.loss_mask(i).astype(np.float32) if weights is None else weights), ""


@dataclass(frozen=True, slots=True)
class NextToken(Objective):
    """Next-token prediction for the tokens of the loss mask."""

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
