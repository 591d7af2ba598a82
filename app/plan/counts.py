"""What a trace has counted, and what a further layer adds to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.engine.counting import Event
from app.plan.flops import Flops
from app.plan.lent import Sizes
from app.plan.memory_plan import KEPT
from app.plan.replay import Worst
from app.plan.share import States
from app.plan.stages import BETWEEN
from app.plan.whose import NOBODY

Numbers = dict[tuple[str, ...], int]  # all that a plan is made of, by name; bytes by phase and kind


@dataclass(frozen=True, slots=True)
class Trace:
    """Of few layers."""

    numbers: Numbers
    more: Mapping[int, Numbers]  # for each further layer, by its sort
    states: States | None  # where what a process keeps is put in place of them
    lent: Sizes
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Counted:
    """In a trace; `on_host` and `offloaded` by whose it is, all of it under nobody."""

    worst: Mapping[str, Worst]  # by phase
    kept: Sequence[tuple[str, int, int]]  # kind, owner and bytes of what is there from step to step
    flops: Mapping[int, Flops]
    on_host: Mapping[int, int]
    offloaded: Mapping[int, int]

    def numbers(self) -> Numbers:
        """Of all of it."""
        flops = sum(self.flops.values(), start=Flops())
        kept = sum(size for kind, _, size in self.kept if kind in KEPT)
        return _numbers({p: w.kinds for p, w in self.worst.items()}, kept, flops, self, NOBODY)

    def more(self, sort: int) -> Numbers:
        """Of one layer."""
        phases = {phase: worst.more(sort) for phase, worst in self.worst.items()}
        kept = sum(size for kind, owner, size in self.kept if kind in KEPT and owner == sort)
        return _numbers(phases, kept, self.flops.get(sort, Flops()), self, sort)


def _numbers(
    phases: Mapping[str, Mapping[str, int]], kept: int, flops: Flops, counted: Counted, whose: int
) -> Numbers:
    numbers: Numbers = {
        (phase, kind): size
        for phase, kinds in phases.items()
        if phase != BETWEEN  # no larger than both places that it lies between, and some depths lack it
        for kind, size in kinds.items()
    }
    return numbers | {
        ("kept",): kept,
        ("host",): counted.on_host.get(whose, 0),
        ("offloaded",): counted.offloaded.get(whose, 0),
        ("flops",): flops.passes,
        ("fp8",): flops.fp8,
        ("repeated",): flops.repeated,
        ("update",): flops.update,
    }
