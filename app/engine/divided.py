"""Gradients and optimizer states divided among processes, weights on each of them (what others call ZeRO, stage 2).

Buckets of neighbouring parameters are dealt to the processes. Each micro-batch is a round: when a bucket is full its
gradients go to the process that owns it, which adds them up, and are let go on the others. The optimizer of a process
steps what the process owns; then each owner sends its weights to all. Whole parameters are owned, no slices of them, so
every optimizer computes what it would with one process, and a checkpoint fits any number of them.

As in `engine.reduction` buckets are sent in one order on every process, and a process that ran out of memory makes its
round again without what was sent: the others wait for the rest. Its parts add up before they are sent, so for such
a round it needs room for all gradients.
"""

from collections import deque
from collections.abc import Container, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from app.batch import Batch
from app.engine.peers import Peers
from app.engine.reduction import BUCKET_BYTES, bytes_of, neighbours
from app.errors import ConfigError
from app.model.dealing import deal
from app.model.lending import Lending
from app.optim.norm import total_norm

_EACH = 4  # buckets of a process at least, so that shares are about equal
_ON_THE_WAY = 1  # buckets beside the one that is being filled
DIVIDING = ("zero2", "zero3")  # of parallel.kind: who has its gradients and states divided


def notes(parallel: str, processes: int) -> list[str]:
    """A remark where there is nobody to divide with."""
    if parallel not in DIVIDING or processes > 1:
        return []
    return [
        f"parallel={parallel} divides nothing among one process; launch.num_processes=auto takes all GPUs"
    ]


def require_enough(parallel: str, tensors: int, processes: int) -> None:
    """Refuse more processes than there are tensors to deal."""
    if parallel in DIVIDING and tensors < processes:
        raise ConfigError(
            f"parallel={parallel} deals what is trained to {processes} processes, and there are {tensors} tensors. "
            f"Set parallel=auto, or launch.num_processes={tensors} or less."
        )


class Wire(Protocol):
    """What goes from process to process, in place. Both ways return what can be waited for."""

    def reduce(self, tensor: Tensor, to: int) -> Any:
        """The sum over all of them to one."""

    def broadcast(self, tensor: Tensor, of: int) -> Any:
        """To all of them."""

    def total(self, tensor: Tensor) -> None:
        """The sum to all of them; returns when it is there."""


class Between:
    """Real processes."""

    def __init__(self, peers: Peers, group: Any = None) -> None:
        self._peers = peers
        self._group = group  # None: of all that is sent otherwise

    def reduce(self, tensor: Tensor, to: int) -> Any:
        """Elsewhere `tensor` is spoilt."""
        return torch.distributed.reduce(tensor, to, async_op=True)

    def broadcast(self, tensor: Tensor, of: int) -> Any:
        """In place."""
        return torch.distributed.broadcast(tensor, of, group=self._group, async_op=True)

    def total(self, tensor: Tensor) -> None:
        """Of numbers on the device."""
        torch.distributed.all_reduce(tensor)

    def highest(self, value: float) -> float:
        """Of numbers on the host."""
        return self._peers.highest(value)


class Divided:
    """How the gradients of several processes come together, each at its owner."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        shares: Sequence["Dealt"],
        rank: int,
        wire: Wire,
        lending: Lending | None = None,  # of weights that other processes have while they need them
    ) -> None:
        self._wire = wire
        self._parameters = parameters
        self._buckets = [_Bucket(*each, rank) for each in shares]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self.stepped: Sequence[nn.Parameter] = [p for p in parameters if self._bucket_of[p].sums is not None]
        self._on_the_way: deque[tuple[_Bucket, Tensor, Any]] = deque()
        self._last = False
        self._everywhere = {p for p in parameters if lending is None or not lending.is_lent(p)}
        for parameter in parameters:
            if parameter in self._everywhere:
                self._wire.broadcast(parameter.data, 0).wait()
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def begin(self) -> None:
        """A step: sums begin at zero."""
        for bucket in self._buckets:
            bucket.begin()
        self._begin_round()

    def rounds(self, batches: Sequence[Batch]) -> list[Sequence[Batch]]:
        """Each micro-batch by itself: no process keeps what it does not own."""
        return [[batch] for batch in batches]

    def begin_again(self) -> None:
        """What was sent is right as it is."""
        self._last = False
        for parameter in self._parameters:
            parameter.grad = None
        for bucket in self._buckets:
            bucket.missing = 0 if bucket.is_sent else len(bucket.parameters)

    def expect_last(self) -> None:
        """From here on full buckets are sent."""
        self._last = True

    def finish(self) -> None:
        """Parameters that got no gradient here have none to add."""
        for bucket in self._buckets:
            self._send(bucket)
        self._land(leave=0)
        self._begin_round()

    def gradients(self) -> list[Tensor]:
        """The sums of what this process owns."""
        return [gradient for bucket in self._buckets for gradient in bucket.attached()]

    def agree(self, gradients: Sequence[Tensor]) -> None:
        """Nothing is added where all is finite."""
        whole = self.norm(total_norm(gradients))
        gradients[0].add_(whole - whole)

    def norm(self, own: Tensor) -> Tensor:
        """The same on every process, to the last bit."""
        squared = own.double().square()
        self._wire.total(squared)
        return squared.sqrt().to(own.dtype)

    def spread(self) -> None:
        """Of each owner to all."""
        sent = [
            self._wire.broadcast(parameter.data, bucket.owner)
            for bucket in self._buckets
            for parameter in bucket.parameters
            if parameter in self._everywhere
        ]
        for each in sent:
            each.wait()

    def _begin_round(self) -> None:
        for bucket in self._buckets:
            bucket.is_sent = False
        self.begin_again()

    def _arrived(self, parameter: nn.Parameter) -> None:
        bucket = self._bucket_of[parameter]
        if bucket.is_sent:
            parameter.grad = None  # made a second time
        elif self._last:
            bucket.missing -= 1
            for each in self._buckets:  # in this order on every process, whatever fills up first
                if each.missing > 0:
                    return
                self._send(each)

    def _send(self, bucket: "_Bucket") -> None:
        if bucket.is_sent:
            return
        self._land(leave=_ON_THE_WAY - 1)
        whole = bucket.taken()
        bucket.is_sent, bucket.missing = True, 0
        self._on_the_way.append((bucket, whole, self._wire.reduce(whole, bucket.owner)))

    def _land(self, leave: int) -> None:
        while len(self._on_the_way) > leave:
            bucket, whole, work = self._on_the_way.popleft()
            work.wait()
            bucket.add(whole)


Dealt = tuple[list[nn.Parameter], int]  # a bucket and who owns it


def bucket_bytes(parameters: Sequence[nn.Parameter], processes: int) -> int:
    """At most, of a bucket of several tensors; 0 where each must be by itself, so that all get one."""
    whole = sum(bytes_of(parameter) for parameter in parameters)
    limit = min(BUCKET_BYTES, whole // (_EACH * processes))
    return limit if len(neighbours(parameters, limit)) >= processes else 0


def buckets(
    parameters: Sequence[nn.Parameter], limit: int, kept: Container[nn.Parameter] = ()
) -> list[list[nn.Parameter]]:
    """In the order in which they fill up and are sent: each that is `kept` by itself, the others with neighbours."""
    alone = [[parameter] for parameter in parameters if parameter in kept]
    others = neighbours([parameter for parameter in parameters if parameter not in kept], limit)
    place = {parameter: at for at, parameter in enumerate(reversed(parameters))}
    return sorted([*alone, *others], key=lambda bucket: place[bucket[-1]])


def dealt(
    parameters: Sequence[nn.Parameter], processes: int, kept: Mapping[nn.Parameter, int] | None = None
) -> list[Dealt]:
    """Buckets and who owns each: the largest first, to who has least. `kept`: whose some weights are already."""
    parallel, kept = ("zero2", {}) if kept is None else ("zero3", kept)
    require_enough(parallel, len(parameters), processes)
    limit = bucket_bytes([parameter for parameter in parameters if parameter not in kept], processes)
    found = buckets(parameters, limit, kept)
    sizes = {at: sum(map(bytes_of, bucket)) for at, bucket in enumerate(found) if bucket[0] not in kept}
    owners = deal(sizes, processes) | {at: kept[each[0]] for at, each in enumerate(found) if each[0] in kept}
    require_enough(parallel, len(set(owners.values())), processes)
    return [(each, owners[at]) for at, each in enumerate(found)]


class _Bucket:
    """Of one owner; only there it has sums."""

    def __init__(self, parameters: list[nn.Parameter], owner: int, rank: int) -> None:
        self.parameters = parameters
        self.owner = owner
        self.is_sent = False
        self.missing = len(parameters)
        self._sizes = [parameter.numel() for parameter in parameters]
        self.sums = self._zeros() if owner == rank else None

    def begin(self) -> None:
        if self.sums is not None:
            self.sums.zero_()

    def taken(self) -> Tensor:
        """Gradients in one piece, which parameters no longer have."""
        if len(self.parameters) == 1 and (only := self.parameters[0].grad) is not None:
            whole = only.contiguous().view(-1)
        elif any(parameter.grad is not None for parameter in self.parameters):
            pieces = (p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters)
            whole = torch.cat([piece.reshape(-1) for piece in pieces])
        else:
            whole = self._zeros()
        for parameter in self.parameters:
            parameter.grad = None
        return whole

    def add(self, whole: Tensor) -> None:
        if self.sums is not None:
            self.sums.add_(whole)

    def attached(self) -> list[Tensor]:
        if self.sums is None:
            return []
        pieces = self.sums.split(self._sizes)
        gradients = [piece.view_as(p) for piece, p in zip(pieces, self.parameters, strict=True)]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        return gradients

    def _zeros(self) -> Tensor:
        first = self.parameters[0]
        return torch.zeros(sum(self._sizes), dtype=first.dtype, device=first.device)
