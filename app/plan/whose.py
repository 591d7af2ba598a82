"""Whose a storage is: a further layer adds to a trace what belongs to one that stands between others of its sort.

What is made while a layer computes, forward or backward, is its own. Two things are made by one layer for another: its
output is the next one's, which keeps it for backward, and the gradient of its input is the one's before. Both are
nobody's where they are not that layer's, for they do not become more with depth.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn

from app.engine.counting import Event, StorageCounter
from app.plan.flops import FlopCounter

NOBODY, PLAIN, AGAIN = range(3)  # layers that keep everything, and those that are computed again
SORTS = (PLAIN, AGAIN)


class Turn(NamedTuple):
    """From an event and a serial on it is the turn of a layer of a sort, or of none."""

    event: int
    serial: int
    sort: int
    of_update: bool  # it does not compute, its weights are changed

    def moved(self, events: int, serials: int) -> "Turn":
        """So much later."""
        return Turn(self.event + events, self.serial + serials, self.sort, self.of_update)


class Mark(NamedTuple):
    """A moment of a counter."""

    event: int
    phase: int
    serial: int
    turn: int


@dataclass(frozen=True, slots=True)
class Span:
    """What a counter saw from a moment on, numbered as if nothing had been before."""

    events: tuple[Event, ...]
    phases: tuple[tuple[int, str], ...]
    kinds: tuple[tuple[int, str], ...]  # of what was held meanwhile
    turns: tuple[Turn, ...]
    owners: tuple[tuple[int, int], ...]
    serials: int

    def left(self) -> set[int]:
        """What is there at its end and was not before; or is gone and was there, which is below 1."""
        came = {serial for serial, size in self.events if size > 0}
        return came ^ {serial for serial, size in self.events if size < 0}


class LayerCounter(StorageCounter):
    """Knows whose a storage is, and sees again what was seen before."""

    def __init__(self, *given: Any, flops: FlopCounter) -> None:
        super().__init__(*given)
        self.turns: list[Turn] = []
        self._flops = flops
        self._owners: dict[int, int] = {}  # where it is not who made it
        self._trained: Mapping[int, Sequence[nn.Parameter]] = {}
        self._gradients: dict[int, int] = {}  # whose they are, by the address of the object
        self._follows = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """A trace is never compiled, and what keeps a compiler out of each operation takes a tenth of its time."""
        return False

    def turn(self, sort: int) -> None:
        """A layer of it begins to compute; nobody: it ends."""
        self._flops.turn = sort
        if sort != (self.turns[-1].sort if self.turns else NOBODY):
            self.turns.append(Turn(len(self.events), self._serial, sort, self._follows))

    def give(self, sort: int, tensors: Iterable[Tensor]) -> None:
        """These are its own."""
        serials = (self.serial_of(tensor) for tensor in tensors)
        self._owners |= {serial: sort for serial in serials if serial is not None}

    def follow(self, trained: Mapping[int, Sequence[nn.Parameter]]) -> None:
        """From here on gradients are made use of, and it is the turn of whoever's they are."""
        self.turn(NOBODY)
        self._owners = self.owners()
        self._trained, self._gradients = trained, {}
        self._follows = bool(trained)

    def stop_following(self) -> None:
        """The step is over."""
        self.turn(NOBODY)
        self._follows = False

    def owners(self) -> dict[int, int]:
        """By serial; of what is missing nobody is the owner."""
        now = Turn(len(self.events), self._serial, NOBODY, of_update=False)
        made = {
            serial: turn.sort
            for turn, after in pairwise([*self.turns, now])
            if turn.sort != NOBODY
            for serial in range(turn.serial + 1, after.serial + 1)
        }
        return made | self._owners

    def mark(self) -> Mark:
        """Now."""
        return Mark(len(self.events), len(self.phases), self._serial, len(self.turns))

    def since(self, mark: Mark) -> Span:
        """What was seen from then on."""
        first = mark.serial
        return Span(
            events=tuple((serial - first, size) for serial, size in self.events[mark.event :]),
            phases=tuple((at - mark.event, phase) for at, phase in self.phases[mark.phase :]),
            kinds=tuple((serial - first, kind) for serial, kind in self.kinds.items() if serial > first),
            turns=tuple(each.moved(-mark.event, -first) for each in self.turns[mark.turn :]),
            owners=tuple((serial - first, sort) for serial, sort in self._owners.items() if serial > first),
            serials=self._serial - first,
        )

    def repeat(self, span: Span, left: Mapping[int, Tensor]) -> None:
        """As if it were seen once more. What is left of it are these tensors, which nobody has seen made."""
        now = self.mark()
        sizes: dict[int, int] = {}
        for serial, size in span.events:
            sizes[serial] = max(size, sizes.get(serial, 0))
            self._count(now.serial + serial, size)
        self.phases += [(now.event + at, phase) for at, phase in span.phases]
        self.kinds |= {now.serial + serial: kind for serial, kind in span.kinds}
        self.turns += [each.moved(now.event, now.serial) for each in span.turns]
        self._owners |= {now.serial + serial: sort for serial, sort in span.owners}
        self._serial += span.serials
        for serial, tensor in left.items():
            self._remember(tensor.untyped_storage(), now.serial + serial, sizes[serial])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What is made of a layer's gradients, weights and states is its own, too."""
        if not self._follows:
            return self._looked_at(func, args, kwargs or {})
        if not self._gradients:  # those that are stepped are there by now: some are parts of a bucket
            self._gradients = {id(p.grad): sort for sort, own in self._trained.items() for p in own}
        several = bool(args) and isinstance(args[0], list | tuple)
        sort = NOBODY if several else self._first_owner(args)
        self.turn(sort)
        before = self._serial
        out = self._looked_at(func, args, kwargs or {})
        if sort != NOBODY:
            self._owners |= dict.fromkeys(range(before + 1, self._serial + 1), sort)
        elif several and isinstance(out, list | tuple):
            for given, made in zip(args[0], out, strict=False):
                self.give(self._owner_of(given), [made])
        return out

    def _first_owner(self, args: Sequence[Any]) -> int:
        owners = (self._owner_of(each) for each in args if isinstance(each, Tensor))
        return next((sort for sort in owners if sort != NOBODY), NOBODY)

    def _owner_of(self, tensor: Tensor) -> int:
        own = self._gradients.get(id(tensor))
        if own is not None:
            return own
        serial = self.serial_of(tensor)
        return NOBODY if serial is None else self._owners.get(serial, NOBODY)
