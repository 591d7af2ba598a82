"""Token rows without files."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from app.data.rows import ENTRY, Store, TokenRows, contents_of, equal_to_earlier
from app.data.storage import digest

Row = tuple[Sequence[int], Sequence[bool]]  # its tokens, and which of them are trained


def token_rows(rows: Sequence[Row]) -> TokenRows:
    """Each row is on a side of its own, unless it is a copy of another."""
    ids = [np.array(tokens, np.int32) for tokens, _ in rows]
    trained = [np.array(mask, np.bool_) for _, mask in rows]
    index = np.zeros(len(rows), ENTRY)
    index["tokens"] = np.cumsum([len(row) for row in ids])
    index["labels"] = [mask.sum() for mask in trained]
    for name, values in (("ids", ids), ("mask", trained), ("side", ids)):
        index[name] = [digest(row) for row in values]
    tokens, again = np.concatenate(ids), equal_to_earlier(contents_of(index))
    largest = int(tokens.max(initial=0))
    return TokenRows(Store(tokens, np.concatenate(trained), np.zeros(0, np.uint8), index, again, largest))


def stretches(trained: NDArray[np.bool_]) -> list[slice]:
    """Trained tokens that nothing interrupts, one by one."""
    found, start = [], None
    for at, each in enumerate([*trained.tolist(), False]):
        if each and start is None:
            start = at
        if not each and start is not None:
            found.append(slice(start, at))
            start = None
    return found
