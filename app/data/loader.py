"""Units of each optimizer step, and the micro-batches of this process.

Step s takes the next R units (rows, or bins of packed rows) in the order of its epoch, R = processes x micro-batches x
units per micro-batch; processes and micro-batches only divide them. The step number determines everything, so the data
position of a checkpoint is one integer, and resuming is immediate.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from app.batch import Batch
from app.data.collate import Layout, Unit, Units
from app.data.token_dataset import TokenRows


@dataclass(frozen=True, slots=True)
class StepSplit:
    """Division of the units of a step by processes and micro-batches."""

    micro_batches: int  # of one process
    processes: int = 1
    rank: int = 0


Order = tuple[Units, NDArray[np.int64]]  # units of an epoch, and the order of their indices


def _random(rows: TokenRows, layout: Layout, seed: int, epoch: int) -> Order:
    """Shuffle rows; after the first epoch, also change which rows share a bin."""
    random = np.random.default_rng([seed, epoch])
    shuffle = np.random.default_rng([seed, epoch, 1]) if epoch else None
    units = layout.units(rows, random.permutation(len(rows)), shuffle)
    return units, random.permutation(len(units))


def _sequential(rows: TokenRows, layout: Layout, _seed: int, _epoch: int) -> Order:
    """Keep the order of the files (a curriculum). A bin has the position of its first row."""
    units = layout.units(rows, np.arange(len(rows)))
    return units, np.argsort(np.minimum.reduceat(units.order, units.starts), kind="stable")


ORDERS: dict[str, Callable[[TokenRows, Layout, int, int], Order]] = {"random": _random, "sequential": _sequential}


class Loader:
    """Loader of the training rows, in the order of each epoch."""

    def __init__(self, rows: TokenRows, layout: Layout, split: StepSplit, seed: int, order: str = "random") -> None:
        self._rows = rows
        self._layout = layout
        self._split = split
        self._seed = seed
        self._order = ORDERS[order]
        self._epoch: tuple[int, Order] | None = None
        self.unit_name = layout.unit_name
        self.units_per_step = layout.units_per_batch * split.micro_batches * split.processes
        self.num_units = len(self._order_of(0)[0])  # of every epoch: the lengths determine it

    @property
    def steps_per_epoch(self) -> int:
        """Steps per epoch. The last one may be smaller; no row is dropped or repeated."""
        return -(-self.num_units // self.units_per_step)

    def batches(self, step: int) -> list[Batch]:
        """Return the micro-batches of this process at `step`, counted from 0 over all epochs."""
        units, chosen = self._chosen(step)
        # attention is quadratic in row length; all else costs the same for equal bins
        work = [int(np.square(self._rows.lengths[unit], dtype=np.int64).sum()) for unit in chosen]
        hardest_first = [chosen[i] for i in np.argsort([-n for n in work], kind="stable")]
        # consecutive parts, larger ones (by one unit) first; some are empty in the last step of an epoch
        processes, rank = self._split.processes, self._split.rank
        count = self._split.micro_batches * processes
        size, more = divmod(len(chosen), count)
        bounds = [size * i + min(i, more) for i in range(count + 1)]
        parts = [hardest_first[start:end] for start, end in pairwise(bounds)]
        # one part per round, in reverse order in every second round, which balances the work of the processes
        rounds = [parts[start : start + processes] for start in range(0, count, processes)]
        parts_of_rank = [part[rank if at % 2 == 0 else -1 - rank] for at, part in enumerate(rounds)]
        epoch = step // self.steps_per_epoch
        return [self._layout.batch(self._rows, part, units.max_documents, epoch) for part in parts_of_rank]

    def largest(self) -> Batch:
        """Return the micro-batch of an epoch with the most labels, or of the longest rows."""
        units, _ = self._order_of(0)
        labels, lengths = self._rows.label_counts, self._rows.lengths
        tokens, trained = (np.add.reduceat(sizes[units.order], units.starts) for sizes in (lengths, labels))
        count = self._layout.units_per_batch
        most = np.lexsort((trained, tokens) if count > 1 else (trained,))[-count:]
        return self._layout.batch(self._rows, [units[i] for i in most], units.max_documents, epoch=0)

    def with_most_rows(self) -> Batch:
        """Return the micro-batch of an epoch with the most rows."""
        return batch_with_most_rows(self._rows, self._layout, self._order_of(0)[0])

    def first_epoch(self) -> Iterator[Batch]:
        """Yield the micro-batches of the first epoch in order, the same for all processes."""
        (units, order), size = self._order_of(0), self._layout.units_per_batch
        for start in range(0, len(order), size):
            chosen = [units[int(i)] for i in order[start : start + size]]
            yield self._layout.batch(self._rows, chosen, units.max_documents, epoch=0)

    def source_locations(self, step: int) -> list[str]:
        return [self._rows.source_location(int(i)) for unit in self._chosen(step)[1] for i in unit]

    def _chosen(self, step: int) -> tuple[Units, list[Unit]]:
        epoch, at = divmod(step, self.steps_per_epoch)
        units, order = self._order_of(epoch)
        numbers = order[at * self.units_per_step : (at + 1) * self.units_per_step]
        return units, [units[int(i)] for i in numbers]

    def _order_of(self, epoch: int) -> Order:
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._order(self._rows, self._layout, self._seed, epoch)
        return self._epoch[1]


def eval_batches(rows: TokenRows, layout: Layout, processes: int = 1, rank: int = 0) -> Iterator[Batch]:
    """Yield every row once over all processes, longest first, so that an OOM occurs immediately.

    Masked tokens are always those of the first epoch, so that evaluations are comparable.
    """
    longest_first: NDArray[np.int64] = np.argsort(-rows.lengths, kind="stable")
    units = layout.units(rows, longest_first)
    size = layout.units_per_batch
    for start in range(rank * size, len(units), processes * size):
        chosen = [units[i] for i in range(start, min(start + size, len(units)))]
        batch = layout.batch(rows, chosen, units.max_documents, epoch=0)
        yield replace(batch, samples=tuple(int(i) for unit in chosen for i in unit))


def batch_with_most_rows(rows: TokenRows, layout: Layout, units: Units | None = None) -> Batch:
    """Return the micro-batch with the most rows; without `units`, of units in row order."""
    units = units or layout.units(rows, np.arange(len(rows)))
    counts = np.diff(units.starts, append=len(units.order))
    most = np.argsort(-counts, kind="stable")[: layout.units_per_batch]
    return layout.batch(rows, [units[int(i)] for i in most], units.max_documents, epoch=0)
