"""Which rows each optimizer step takes, and the micro-batches that this process makes of them.

Step s takes the next R rows of its epoch's order, R = processes x micro-batches x rows; processes and micro-batches
only divide them. Everything follows from the step number, so the cursor of a checkpoint is one integer, and
continuing costs nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from app.batch import Batch
from app.data.collate import collate_padded
from app.data.rows import TokenRows


@dataclass(frozen=True, slots=True)
class Division:
    """How the rows of a step are divided, and which share is ours."""

    rows: int  # of one micro-batch
    micro_batches: int  # of one process
    processes: int = 1
    rank: int = 0

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step, over all processes."""
        return self.rows * self.micro_batches * self.processes


class Loader:
    """The training rows in the order of each epoch."""

    def __init__(self, rows: TokenRows, division: Division, seed: int, pad_id: int) -> None:
        self._rows = rows
        self._division = division
        self._seed = seed
        self._pad_id = pad_id
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """The last step of an epoch may be smaller; no row is dropped or repeated."""
        return -(-len(self._rows) // self._division.rows_per_step)

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of this process at `step`, counted from 0 over all epochs."""
        share = self._division
        chosen = self._rows_of(step)
        # rows of like length side by side waste little padding; the sum over the step does not depend on it
        chosen = chosen[np.argsort(-self._rows.lengths[chosen], kind="stable")]
        parts = _even_parts(chosen, share.micro_batches * share.processes)
        return [_padded(self._rows, part, self._pad_id) for part in parts[share.rank :: share.processes]]

    def places(self, step: int) -> list[str]:
        """Where the rows of `step` came from."""
        return [self._rows.place(int(i)) for i in self._rows_of(step)]

    def _rows_of(self, step: int) -> np.ndarray:
        epoch, at = divmod(step, self.steps_per_epoch)
        size = self._division.rows_per_step
        return self._epoch_order(epoch)[at * size : (at + 1) * size]

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self._rows))
        return self._order[1]


def eval_batches(
    rows: TokenRows, per_batch: int, pad_id: int, processes: int = 1, rank: int = 0
) -> Iterator[Batch]:
    """Every row once, over all processes; longest first, so that memory is tried at once."""
    order = np.argsort(-rows.lengths, kind="stable")
    starts = range(0, len(order), per_batch)
    for start in starts[rank::processes]:
        yield _padded(rows, order[start : start + per_batch], pad_id)


def _even_parts(chosen: np.ndarray, parts: int) -> list[np.ndarray]:
    """Consecutive parts that differ by at most one row; some are empty in the last step of an epoch."""
    return np.array_split(chosen, parts)


def _padded(rows: TokenRows, indices: np.ndarray, pad_id: int) -> Batch:
    return collate_padded([(rows.ids(int(i)), rows.trained(int(i))) for i in indices], pad_id)
