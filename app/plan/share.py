"""What one of several processes keeps where gradients and states are divided (`parallel=zero2`, `zero3`).

A trace keeps all of both, and sends its gradients nowhere; the share of one process is put in place of what is kept
here. Both are there from step to step, so nothing else depends on how many they are.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from app.engine.counting import rounded
from app.engine.divided import bucket_bytes, dealt
from app.engine.reduction import bytes_of
from app.plan.lent import Kept, Owners, Sizes, any_layer

DIVIDED = ("gradients", "optimizer_states")


@dataclass(frozen=True, slots=True)
class States:
    """Of an optimizer, in bytes by the names of parameters: on the device, and paged to the host."""

    device: Mapping[str, int]
    host: Mapping[str, int]
    common: int  # of all of them together

    def of(self, name: str) -> tuple[int, int]:
        """A layer that was not traced has those of one that was."""
        known = name if name in self.device else any_layer(name)
        return self.device[known], self.host[known]


@dataclass(frozen=True, slots=True)
class Share:
    """Of one process."""

    gradients: int
    states: int
    host: int
    part: float  # of all that is trained
    weights: Kept  # of those that are lent


class Nowhere:
    """What goes between processes, in a trace of one."""

    sees: Callable[[Tensor], None] | None = None  # what would be on its way to its owner

    def reduce(self, tensor: Tensor, _to: int) -> Self:
        """Its own is all."""
        if self.sees is not None:
            self.sees(tensor)
        return self

    def broadcast(self, _tensor: Tensor, _of: int) -> Self:
        """All have it."""
        return self

    def wait(self) -> None:
        """It was there at once."""

    def total(self, _tensor: Tensor) -> None:
        """As it is."""

    def highest(self, value: float) -> float:
        """Of one."""
        return value


class Division:
    """Of the trained parameters of a whole model, by name, among so many processes. None of them needs memory.

    `owners`: of weights that are lent.
    """

    def __init__(
        self, trained: Mapping[str, nn.Parameter], processes: int, owners: Owners | None = None
    ) -> None:
        parameters = list(trained.values())
        kept = None if owners is None else owners.of_trained(trained)
        self.processes = processes
        self.owners = owners
        self._names = {id(each): name for name, each in trained.items()}
        self._whole = sum(map(bytes_of, parameters))
        self._dealt = dealt(parameters, processes, kept)
        self.bucket_bytes = bucket_bytes([each for each in parameters if each not in (kept or {})], processes)

    def shares(self, states: States, sizes: Sizes) -> list[Share]:
        """Of each process. `sizes`: of modules whose weights are lent."""
        return [self._share(rank, states, sizes) for rank in range(self.processes)]

    def heaviest(self) -> int:
        """Who keeps most, as far as it can be known without a trace: states are taken for twice the weights."""
        loads = [0] * self.processes if self.owners is None else self.owners.loads(self.processes)
        for bucket, owner in self._dealt:
            loads[owner] += 3 * sum(map(bytes_of, bucket))
        return loads.index(max(loads))

    def _share(self, rank: int, states: States, sizes_of_modules: Sizes) -> Share:
        buckets = [bucket for bucket, owner in self._dealt if owner == rank]
        found = [states.of(self._names[id(each)]) for bucket in buckets for each in bucket]
        sizes = [sum(map(bytes_of, bucket)) for bucket in buckets]
        return Share(
            gradients=sum(map(rounded, sizes)),
            states=sum(device for device, _ in found) + states.common,
            host=sum(host for _, host in found),
            part=sum(sizes) / self._whole,
            weights=Kept({}, []) if self.owners is None else self.owners.kept(rank, sizes_of_modules),
        )


def states_of(optimizer: Optimizer) -> States:
    """Its parameters named as in the trainee's network; what several share is counted once."""
    device: dict[str, int] = {}
    host: dict[str, int] = {}
    shared = of_several(optimizer)
    for full, tensors in named_states(optimizer):
        name = full.removeprefix("network.")
        here = [each for each in tensors if each.untyped_storage()._cdata not in shared]
        device[name] = sum(rounded(each.untyped_storage().nbytes()) for each in here if not each.is_meta)
        host[name] = sum(bytes_of(each) for each in here if each.is_meta)
    for sizes in (device, host):
        sizes |= {any_layer(name): size for name, size in sizes.items()}
    return States(device, host, sum(shared.values()))


def named_states(optimizer: Optimizer) -> Iterator[tuple[str, list[Tensor]]]:
    """Of each parameter, by its name in the trainee."""
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            yield name, _tensors(optimizer.state.get(parameter))


def of_several(optimizer: Optimizer) -> dict[int, int]:
    """Storages that states of more than one parameter have, and their bytes."""
    storages = [each.untyped_storage() for state in optimizer.state.values() for each in _tensors(state)]
    count = Counter(each._cdata for each in storages)
    return {each._cdata: rounded(each.nbytes()) for each in storages if count[each._cdata] > 1}


def _tensors(state: Any) -> list[Tensor]:
    return [value for value in (state or {}).values() if isinstance(value, Tensor)]
