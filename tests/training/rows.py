"""Token rows without files."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from app.data.token_dataset import RecordBatchView, TokenRows, as_columns, digest, record_batch
from app.data.tokenizer import Tokens

Row = tuple[Sequence[int], Sequence[bool]]  # its tokens, and which of them are trained


def token_rows(rows: Sequence[Row]) -> TokenRows:
    """Each row is on a side of its own, unless it is a copy of another."""
    samples = [Tokens(np.array(ids, np.int32), np.array(trained, np.bool_)) for ids, trained in rows]
    columns = [as_columns(f"f:{at}", labeled, digest(labeled.ids)) for at, labeled in enumerate(samples)]
    return TokenRows(RecordBatchView(record_batch(columns)))


def stretches(trained: NDArray[np.bool_]) -> list[slice]:
    """Trained tokens that nothing interrupts, one by one."""
    spans, start = [], None
    for at, is_trained in enumerate([*trained.tolist(), False]):
        if is_trained and start is None:
            start = at
        if not is_trained and start is not None:
            spans.append(slice(start, at))
            start = None
    return spans
