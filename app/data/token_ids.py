"""Rows of token IDs that another program made: `input_ids`, `labels` and `attention_mask` as in transformers."""

import numpy as np
from numpy.typing import NDArray

from app.config.schema import Columns
from app.data.columns import optional, value
from app.data.rows import Row, RowProblem, TokenIds, kind_of

UNTRAINED = -100  # label of a token that is not in the loss
_MASK_VALUES = (0, 1)

_Integers = NDArray[np.integer]


def token_ids(row: Row, columns: Columns) -> TokenIds:
    """Read the IDs of a row without its padding; RowProblem if labels or mask do not fit them."""
    ids = _integers(value(row, columns.input_ids), columns.input_ids)
    labels, mask = (_of_length(row, name, columns.input_ids, ids) for name in (columns.labels, columns.attention_mask))
    trained = np.ones(len(ids), np.bool_) if labels is None else labels != UNTRAINED
    if labels is not None:
        _require_aligned(columns, labels, ids)
    first, end = (0, len(ids)) if mask is None else _unpadded(str(columns.attention_mask), mask)
    padded = [*range(first), *range(end, len(ids))]
    if labels is not None and trained[padded].any():
        at = next(at for at in padded if trained[at])
        raise RowProblem(
            f"column {columns.labels!r}: the label at index {at} is {labels[at]}, but {columns.attention_mask!r} is 0"
            f" there (padding); set the label to {UNTRAINED}"
        )
    return TokenIds(ids[first:end], trained[first:end], has_labels=labels is not None)


def _integers(cell: object, name: str | None) -> _Integers:
    """Return a list of integers as an array."""
    if not isinstance(cell, list):
        raise RowProblem(f"column {name!r} must be a list of integers, found {kind_of(cell)}")
    if not cell:
        raise RowProblem(f"column {name!r} is empty")
    odd = next((at for at, number in enumerate(cell) if type(number) is not int), None)
    if odd is not None:
        raise RowProblem(f"column {name!r} must be a list of integers, found {kind_of(cell[odd])} at index {odd}")
    try:
        return np.array(cell, np.int64)
    except OverflowError:
        raise RowProblem(f"column {name!r} has a number that is too large for a token ID") from None


def _of_length(row: Row, name: str | None, of_ids: str, ids: _Integers) -> _Integers | None:
    """Return an optional column of integers, one per token ID."""
    cell = optional(row, name)
    if cell is None:
        return None
    numbers = _integers(cell, name)
    if len(numbers) != len(ids):
        raise RowProblem(f"column {name!r} has {len(numbers):,} values, but {of_ids!r} {len(ids):,}")
    return numbers


def _require_aligned(columns: Columns, labels: _Integers, ids: _Integers) -> None:
    wrong = np.flatnonzero((labels != UNTRAINED) & (labels != ids))
    if not len(wrong):
        return
    at = wrong[0]
    shifted = len(ids) > 2 and bool(((labels[:-1] == ids[1:]) | (labels[:-1] == UNTRAINED)).all())
    remedy = f"align them, without a shift: labels[i] = {columns.input_ids}[i]" if shifted else "fix the row"
    raise RowProblem(
        f"column {columns.labels!r}: the label at index {at} is {labels[at]}, expected {UNTRAINED} or the token ID"
        f" there, {ids[at]}; {remedy}"
    )


def _unpadded(name: str, mask: _Integers) -> tuple[int, int]:
    """Return the start and end of the tokens between the padding at both ends."""
    if not np.isin(mask, _MASK_VALUES).all():
        raise RowProblem(f"column {name!r} must have only 0 and 1")
    tokens = np.flatnonzero(mask)
    if not len(tokens):
        raise RowProblem(f"column {name!r} is 0 for all tokens")
    first, end = int(tokens[0]), int(tokens[-1]) + 1
    if len(tokens) < end - first:
        at = first + int(np.argmin(mask[first:end]))
        raise RowProblem(
            f"column {name!r} is 0 at index {at}, between tokens; only padding at the ends may have 0. To ignore the"
            " column, set dataset.columns.attention_mask=null"
        )
    return first, end
