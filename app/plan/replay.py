"""What is alive at the worst instant of each stage of a step, read from the order in which storages came and went."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from app.engine.counting import Event
from app.plan.memory_plan import KEPT
from app.plan.stages import FORWARD, HEAD, HEAD_BACKWARD
from app.plan.whose import NOBODY, SORTS, Turn

_LOSS_HEAD = (HEAD, HEAD_BACKWARD)
_LEFT = ("saved_activations", "temporary", "loss_head")  # by layers, not what they borrow
_Alive = dict[tuple[str, int], int]  # bytes by kind and owner


@dataclass(frozen=True, slots=True)
class Worst:
    """An instant at which most is alive."""

    alive: _Alive
    turn: int  # whose it is
    left: Sequence[_Alive]  # what was there of them after each of their turns
    turns: int  # of these, how many were over

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes by kind."""
        found: dict[str, int] = {}
        for (kind, _), size in self.alive.items():
            found[kind] = found.get(kind, 0) + size
        return found

    def more(self, sort: int) -> dict[str, int]:
        """The same of what a further layer of a sort adds.

        Where most is alive in the turn of the layer itself, others would wait for theirs or have had it: of what
        passes a further one adds what it leaves before or after.
        """
        found = {kind: size for (kind, whose), size in self.alive.items() if whose == sort and kind in KEPT}
        return found | (self._waiting if self.turn == sort else _passing(self.alive, sort))

    @property
    def _waiting(self) -> dict[str, int]:
        around = [_passing(each, self.turn) for each in self.left[max(0, self.turns - 1) : self.turns + 1]]
        return max(around, key=lambda kinds: sum(kinds.values()), default={})


def _passing(alive: _Alive, sort: int) -> dict[str, int]:
    return {kind: size for (kind, whose), size in alive.items() if whose == sort and kind in _LEFT}


class _Turns:
    """Whose it is, event by event."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._coming = deque(turns)
        self._now = Turn(0, 0, NOBODY, of_update=False)
        self._over: list[int] = []  # whose turn has just been
        self._left: dict[int, list[_Alive]] = {sort: [] for sort in (NOBODY, *SORTS)}

    def reach(self, event: int, size: int, alive: _Alive) -> None:
        """It is about to happen. What goes right after a turn was not left behind: it was held by the caller."""
        while self._coming and self._coming[0].event <= event:
            if self._now.sort != NOBODY and not self._now.of_update:
                self._over.append(self._now.sort)
            self._now = self._coming.popleft()
        if size > 0:
            for sort in self._over:
                self._left[sort].append({name: each for name, each in alive.items() if name[1] == sort})
            self._over.clear()

    def worst(self, alive: _Alive) -> Worst:
        """Now."""
        left = self._left[self._now.sort]
        return Worst(dict(alive), self._now.sort, left, len(left))


@dataclass(frozen=True, slots=True)
class Seen:
    """By a counter."""

    events: Sequence[Event]
    stages: Sequence[tuple[int, str]]  # by the event that each begins with
    kinds: Mapping[int, str]  # of the storages that are kept, by serial
    owners: Mapping[int, int]  # of those that some layer owns
    turns: Sequence[Turn]

    def held(self) -> list[tuple[str, int, int]]:
        """Kind, owner and bytes of what is kept, or lent."""
        sizes = {serial: size for serial, size in reversed(self.events) if size > 0}
        whose = self.owners
        return [(kind, whose.get(at, NOBODY), sizes.get(at, 0)) for at, kind in self.kinds.items()]


class Replay:
    """Goes through it once more."""

    def __init__(self, seen: Seen) -> None:
        self._events = seen.events
        self._bounds = [(0, ""), *seen.stages, (len(seen.events), "")]
        self._kinds = dict(seen.kinds)
        self._owners = seen.owners
        self._turns = seen.turns
        self._name_the_others()

    def phases(self) -> dict[str, Worst]:
        """The worst instant of each stage; one that is reached more than once is one."""
        names = {serial: (kind, self._owners.get(serial, NOBODY)) for serial, kind in self._kinds.items()}
        alive: _Alive = {}
        worst: dict[str, Worst] = {}
        turns = _Turns(self._turns)
        for (start, stage), (end, _) in pairwise(self._bounds):
            total = sum(alive.values())
            most = sum(worst[stage].alive.values()) if stage in worst else -1
            if total > most:
                most, worst[stage] = total, turns.worst(alive)
            for at, (serial, size) in enumerate(self._events[start:end], start):
                turns.reach(at, size, alive)
                name = names[serial]
                alive[name] = alive.get(name, 0) + size
                total += size
                if total > most:
                    most, worst[stage] = total, turns.worst(alive)
        worst.pop("")  # what was there before
        return worst

    def _name_the_others(self) -> None:
        """What is let go before the stage ends in which it was made is temporary, in any of them."""
        gone = {serial: at for at, (serial, size) in enumerate(self._events) if size < 0}
        for (start, stage), (end, _) in pairwise(self._bounds):
            for serial, size in self._events[start:end]:
                if size > 0 and serial not in self._kinds:
                    self._kinds[serial] = _kind(stage, survives=gone.get(serial, end) >= end)


def _kind(stage: str, *, survives: bool) -> str:
    if stage in _LOSS_HEAD:
        return "loss_head"
    return "saved_activations" if stage == FORWARD and survives else "temporary"
