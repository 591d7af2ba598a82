"""What a micro-batch is made of: padded rows, or bins of rows packed side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from app.batch import Batch
from app.data.collate import BinShape, collate_packed, collate_padded
from app.data.labels import NEXT_TOKENS, Labels, read
from app.data.packing import plan_bins, stirred
from app.data.token_rows import TokenRows

Unit = NDArray[np.int64]  # the rows that are never parted: one row, or those of a bin


@dataclass(frozen=True, slots=True)
class Units:
    """All units of an epoch: unit i holds the rows `order[starts[i]:starts[i + 1]]`."""

    order: NDArray[np.int64]
    starts: NDArray[np.int64]
    most_documents: int = 1  # of a unit, filling included

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> Unit:
        end = self.starts[i + 1] if i + 1 < len(self.starts) else len(self.order)
        return self.order[self.starts[i] : end]


class Layout(Protocol):
    """How rows become units, and units a batch."""

    @property
    def units_per_batch(self) -> int:
        """Units of one micro-batch."""

    @property
    def unit_name(self) -> str:
        """In the plural, for people."""

    def units(
        self, rows: TokenRows, order: NDArray[np.int64], stir: np.random.Generator | None = None
    ) -> Units:
        """All rows, in units; `order` says which of equal rows come first, `stir` who else may change places."""

    def batch(self, rows: TokenRows, units: Sequence[Unit], most_documents: int, epoch: int) -> Batch:
        """One micro-batch; of no units, one that trains nothing. `most_documents` is that of all its units."""


@dataclass(frozen=True, slots=True)
class Padded:
    """Each row by itself, padded to the longest of its micro-batch."""

    rows: int
    pad_id: int
    labels: Labels = NEXT_TOKENS

    @property
    def units_per_batch(self) -> int:
        """As many as were asked for."""
        return self.rows

    @property
    def unit_name(self) -> str:
        """What `batching.rows` counts."""
        return "rows"

    def units(
        self,
        rows: TokenRows,
        order: NDArray[np.int64],
        stir: np.random.Generator | None = None,  # noqa: ARG002  rows are alone
    ) -> Units:
        """One row each."""
        return Units(order, np.arange(len(rows)))

    def batch(self, rows: TokenRows, units: Sequence[Unit], most_documents: int, epoch: int) -> Batch:  # noqa: ARG002  rows are alone
        """Rows of like length side by side waste little; the sum of a step does not depend on it."""
        labelled = read(rows, units, self.labels, epoch)
        return collate_padded(labelled, self.pad_id, isolate=self.labels.both_ways)


@dataclass(frozen=True, slots=True)
class Packed:
    """Bins of `tokens`, filled best-fit over all rows; one bin is one micro-batch."""

    tokens: int
    pad_id: int
    longest: int  # no row has more tokens; at most `tokens`
    labels: Labels = NEXT_TOKENS

    @property
    def units_per_batch(self) -> int:
        """A longer bin does what more bins would."""
        return 1

    @property
    def unit_name(self) -> str:
        """Of `batching.tokens` each."""
        return "bins"

    def units(
        self, rows: TokenRows, order: NDArray[np.int64], stir: np.random.Generator | None = None
    ) -> Units:
        """The bins of a plan over rows in `order`: stirred or not as many, of as many documents at most."""
        lengths = rows.lengths[order]
        placed, starts = plan_bins(lengths, self.tokens)
        most = self._most_documents(lengths[placed], starts)
        if stir is not None and len(starts) > 1:
            most_room = (
                most - np.diff(starts, append=len(placed))
            ) * self.longest  # to be filled by documents
            placed = stirred(placed, starts, lengths[placed], self.tokens, most_room, stir)
        return Units(order[placed], starts, most)

    def batch(self, rows: TokenRows, units: Sequence[Unit], most_documents: int, epoch: int) -> Batch:
        """One bin, filled up to its full length."""
        shape = BinShape(self.tokens, self.longest, most_documents)
        return collate_packed(read(rows, units, self.labels, epoch), self.pad_id, shape)

    def _most_documents(self, lengths: NDArray[Any], starts: NDArray[np.int64]) -> int:
        """The same for any order of the rows. No row is longer than what fills up, so a bin without rows has fewer."""
        if not len(starts):
            return -(-self.tokens // self.longest)
        room = self.tokens - np.add.reduceat(lengths.astype(np.int64), starts)
        rows = np.diff(starts, append=len(lengths))
        return int((rows - (-room // self.longest)).max())
