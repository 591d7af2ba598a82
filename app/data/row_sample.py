"""Row sample of `dataset.sample`: a subset selected by the content of the rows, independent of their order."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.data.columns import optional
from app.data.labels import LABELINGS, as_text
from app.data.rows import Broken, Located, Row, RowProblem


@dataclass(frozen=True, slots=True)
class RowSample:
    """Number of rows, and the label column if all classes have equal shares."""

    number: int
    label: str | None = None

    def selected(self, rows: Iterable[Located]) -> NDArray[np.bool_]:
        """Return whether each row is in the sample: those with the lowest hashes, in each class if there are classes.

        A class with too few rows leaves its share to the others. Rows that are unreadable or have no valid label are
        selected in addition, so that they are reported as bad rows.
        """
        at, hashes, classes = [], [], []
        number_of_class: dict[str, int] = {}
        count = 0
        for _, row in rows:
            name = self._class_of(row)
            if name is not None:
                at.append(count)
                hashes.append(_hash(row))
                classes.append(number_of_class.setdefault(name, len(number_of_class)))
            count += 1
        lowest = np.array(at, np.int64)[_lowest(np.array(hashes, np.uint64), np.array(classes), self.number)]
        selected = np.ones(count, np.bool_)
        selected[at] = False
        selected[lowest] = True
        return selected

    def _class_of(self, row: Row | Broken) -> str | None:
        """Return the class of a row, empty if there are none; None for a bad row."""
        if isinstance(row, Broken):
            return None
        if self.label is None:
            return ""
        try:
            name = as_text(optional(row, self.label))
        except RowProblem:
            return None
        return None if LABELINGS["single"].problem(name) else name


def _hash(row: Row | Broken) -> int:
    text = json.dumps(row, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _lowest(hashes: NDArray[np.uint64], classes: NDArray[np.int64], number: int) -> NDArray[np.int64]:
    """Return the indices of the `number` lowest hashes, taken from all classes in turn."""
    by_class = np.lexsort((hashes, classes))
    first_of_class = np.searchsorted(classes[by_class], classes[by_class])
    ranks = np.empty(len(hashes), np.int64)
    ranks[by_class] = np.arange(len(hashes)) - first_of_class
    return np.lexsort((hashes, ranks))[:number]
