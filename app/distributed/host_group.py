"""What the processes of a run tell each other on the host: a few numbers, never through a device."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from app.errors import EnvironmentProblem

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Peers:
    """All processes of the run, this one among them. `group` is one of gloo; None when there is but one process."""

    rank: int
    count: int
    group: Any = None

    def gathered(self, values: Sequence[float]) -> list[list[float]]:
        """The values of every process, in their order."""
        if self.group is None:
            return [[float(value) for value in values]]
        mine = torch.tensor(values, dtype=torch.float64)
        every = [torch.empty_like(mine) for _ in range(self.count)]
        torch.distributed.all_gather(every, mine, group=self.group)
        return [each.tolist() for each in every]

    def totals(self, values: Sequence[float]) -> list[float]:
        """Each value summed over all processes, everywhere in the same order."""
        return [sum(column) for column in zip(*self.gathered(values), strict=True)]

    def highest(self, value: float) -> float:
        """The largest of all processes' values."""
        return max(each for (each,) in self.gathered([value]))

    def collected(self, value: Any) -> list[Any]:
        """A plain object of every process."""
        if self.group is None:
            return [value]
        every: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(every, value, group=self.group)
        return every

    def in_step(self, items: Iterable[Item]) -> Iterator[Item | None]:
        """As many on every process: None after the last where others have more."""
        waiting = iter(items)
        while True:
            item = next(waiting, None)
            if not self.highest(item is not None):
                return
            yield item

    def wait_for_all(self) -> None:
        """Nobody goes on before everybody is here."""
        if self.group is not None:
            torch.distributed.barrier(group=self.group)

    def require_same(self, facts: Mapping[str, Any]) -> None:
        """Processes that would train different things must not train together."""
        for rank, theirs in enumerate(self.collected(dict(facts))):
            different = [
                f"{key}: {facts.get(key)} on process {self.rank}, {theirs.get(key)} on process {rank}"
                for key in sorted({*facts, *theirs})
                if facts.get(key) != theirs.get(key)
            ]
            if different:
                raise EnvironmentProblem(
                    f"the processes of this run do not see the same ({'; '.join(different[:4])}). Give all of them "
                    "the same settings, and output_dir and the data on a disk that they share."
                )
