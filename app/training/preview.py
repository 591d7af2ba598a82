"""A few training rows as people read them, with what the model must predict of them, and how long all rows are."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.data.length_statistics import histogram
from app.data.objectives import Classification, Objective
from app.data.token_dataset import TokenRows

_ROWS = 4
_STRETCHES = 200  # of a row
_LONGEST = 160  # tokens of a stretch that are shown, half from its beginning and half from its end


def preview(rows: TokenRows, labels: Objective, tokenizer: Any, *, first: bool = False) -> dict[str, Any]:
    """Rows from the whole of the data, not only its beginning; or the `first`."""
    count = min(_ROWS, len(rows))
    chosen = range(count) if first else np.linspace(0, len(rows) - 1, count).astype(int).tolist()
    show = _example if isinstance(labels, Classification) else _row
    hidden = labels.bidirectional and not isinstance(labels, Classification)
    return {
        "marked": "hidden in the first epoch, to be predicted" if hidden else "to be predicted",
        "rows": [show(rows, i, _marks(rows, i, labels), tokenizer) for i in chosen],
        "lengths": histogram(rows.lengths),
    }


def _marks(rows: TokenRows, i: int, labels: Objective) -> NDArray[np.float32]:
    """How much each token counts in the loss; 0: it is not to be predicted."""
    if not labels.bidirectional or isinstance(labels, Classification):
        weights = rows.weights(i)
        return rows.loss_mask(i).astype(np.float32) if weights is None else weights
    drawn = np.zeros(len(rows.ids(i)), np.float32)
    drawn[labels.label(rows, i, epoch=0).at] = 1.0
    return drawn


def _row(rows: TokenRows, i: int, marks: NDArray[np.float32], tokenizer: Any) -> dict[str, Any]:
    ids = rows.ids(i).tolist()
    edges = [0, *(np.flatnonzero(np.diff(marks)) + 1).tolist(), len(ids)]
    pieces: list[dict[str, Any]] = []
    for start, end in list(pairwise(edges))[:_STRETCHES]:
        text = "".join(_texts(ids, start, end, tokenizer))
        weight = float(f"{marks[start]:.6g}")  # as it was written: it is kept with 24 bits
        other = {} if weight in (0.0, 1.0) else {"weight": weight}
        pieces.append({"text": text, "trained": bool(weight), **other})
    if len(edges) - 1 > _STRETCHES:
        pieces.append({"text": f" … ({len(ids) - edges[_STRETCHES]:,} more tokens)", "trained": False})
    return {
        "place": rows.source_location(i),
        "tokens": len(ids),
        "trained_tokens": int(np.count_nonzero(marks)),
        "pieces": pieces,
    }


def _example(rows: TokenRows, i: int, marks: NDArray[np.float32], tokenizer: Any) -> dict[str, Any]:
    """What is to be predicted stands behind the text, and is no part of it."""
    row = _row(rows, i, marks, tokenizer)
    label = {"text": rows.class_of(i), "trained": True}
    return {**row, "trained_tokens": 1, "pieces": [*row["pieces"], {"text": "\n", "trained": False}, label]}


def _texts(ids: list[int], start: int, end: int, tokenizer: Any) -> Iterator[str]:
    """Of a stretch; the middle of a long one is left out, and that is said."""
    left_out = end - start - _LONGEST
    if left_out <= 0:
        yield _text(ids, start, end, tokenizer)
        return
    yield _text(ids, start, start + _LONGEST // 2, tokenizer)
    yield f" … ({left_out:,} tokens) … "
    yield _text(ids, end - _LONGEST // 2, end, tokenizer)


def _text(ids: list[int], start: int, end: int, tokenizer: Any) -> str:
    """With the token before it where that can be taken off again: some tokenizers drop the space they begin with."""
    alone: str = tokenizer.decode(ids[start:end])
    if start == 0:
        return alone
    before: str = tokenizer.decode(ids[start - 1 : start])
    both: str = tokenizer.decode(ids[start - 1 : end])
    return both.removeprefix(before) if both.startswith(before) else alone
