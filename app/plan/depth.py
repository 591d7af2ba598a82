"""A plan for many layers from a trace of few.

At each place of a step, what is alive is affine in the number of layers that keep everything and in the number of
those that are computed again: the peak is the largest of these places, wherever it moves to. A further layer adds what
one adds that stands between others of its sort (`plan.middle`). Nothing recomputed and everything recomputed have
places of their own, so a trace is of the same sort as what it is for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.engine.counting import BORROWED
from app.model.outline import Outline
from app.plan.counts import Numbers, Trace
from app.plan.known import Known
from app.plan.lent import Kept
from app.plan.memory_plan import ANATOMY, MemoryPlan
from app.plan.share import DIVIDED, Division, Share
from app.plan.stages import ORDER
from app.plan.trace import Asked, trace
from app.plan.whose import AGAIN, PLAIN

_FEW = 3  # layers of a sort: the first and the last are special, and one stands for all between


class Depths:
    """Plans of one step that differ in how many layers are recomputed; what was traced for one serves the others."""

    def __init__(
        self,
        asked: Asked,
        outline: Outline,
        division: Division | None,
        known: Known,
    ) -> None:
        self._asked = asked
        self._division = division
        self.outline = outline
        self._traces: dict[tuple[_Depth, tuple[int, int] | None], Trace] = {}
        self._known = known
        self.layers = outline.depth

    def planned(self, recompute: bool | int, *, exact: bool = False) -> MemoryPlan:
        """By one trace where there are few layers, or where they differ."""
        depth = self.outline.depth
        recomputed = depth if recompute is True else int(recompute)
        whole = _Depth(depth - recomputed, recomputed)
        if exact or not self.outline.alike or depth <= 2 * _FEW:
            return self._whole(whole)
        return self._extrapolated(whole)

    @property
    def _lends(self) -> bool:
        return self._asked.parts is not None and self._asked.parts.lends

    def _whole(self, depth: "_Depth") -> MemoryPlan:
        """Of all layers at once, and where weights are divided of the process that keeps most."""
        asked, division = self._asked, self._division
        if asked.parts is not None and division is not None and self._lends:
            part = division.heaviest(), division.processes
            asked = replace(asked, parts=replace(asked.parts, part=part))
        found = self._trace(depth, asked)
        plan = self._plan(found.numbers, found, found.events, depth)
        return replace(plan, divided=asked.parts is not None)

    def _trace(self, depth: "_Depth", asked: Asked | None = None) -> Trace:
        asked = asked or self._asked
        known = depth, None if asked.parts is None else asked.parts.part
        if known not in self._traces:
            self._traces[known] = trace(asked, self.outline, depth.plain, depth.recomputed, self._known)
        return self._traces[known]

    def _extrapolated(self, whole: "_Depth") -> MemoryPlan:
        second = self._asked.run.training.offload  # is special, too
        few = _Depth(min(whole.plain, _FEW), min(whole.recomputed, _FEW + second))
        found = self._trace(few)
        further = {PLAIN: whole.plain - few.plain, AGAIN: whole.recomputed - few.recomputed}
        numbers = dict(found.numbers)
        for sort, layers in further.items():
            for name, size in found.more.get(sort, {}).items():
                numbers[name] = numbers.get(name, 0) + layers * size
        plan = self._plan(numbers, found, None, whole)
        return replace(plan, few_events=found.events, traced_layers=few.plain + few.recomputed)

    def _plan(
        self, numbers: Numbers, traced: Trace, events: tuple[tuple[int, int], ...] | None, whole: "_Depth"
    ) -> MemoryPlan:
        depth = whole.plain + whole.recomputed
        if self._division is None or traced.states is None:
            return _plan(self._asked, numbers, events, depth)
        shares = self._division.shares(traced.states, traced.lent)
        own = [_borrowed(_divided(numbers, each), each.weights, whole.recomputed) for each in shares]
        return replace(_plan(self._asked, _largest(own), events, depth), divided=True)


@dataclass(frozen=True, slots=True)
class _Depth:
    plain: int
    recomputed: int


def _divided(numbers: Numbers, share: Share) -> Numbers:
    """What one process keeps, in place of all."""
    kept = dict(zip(DIVIDED, (share.gradients, share.states), strict=True))
    own = {name: kept.get(name[-1], size) if len(name) > 1 else size for name, size in numbers.items()}
    some_phase = next(name[0] for name in numbers if len(name) > 1)
    others = sum(numbers.get((some_phase, kind), 0) - size for kind, size in kept.items())
    return own | {
        ("kept",): numbers["kept",] - others,
        ("host",): share.host,
        ("update",): round(numbers["update",] * share.part),
    }


def _borrowed(numbers: Numbers, kept: Kept, recomputed: int) -> Numbers:
    """With the weights that one process keeps, which need not come where their layer is wanted."""
    if not kept.layers:
        return numbers
    known, own = kept.of_phases(recomputed), dict(numbers)
    for phase in {name[0] for name in numbers if len(name) > 1}:
        for kind, size in kept.kinds.items():
            own[phase, kind] = own.get((phase, kind), 0) + size
        own[phase, BORROWED] = max(0, own.get((phase, BORROWED), 0) - known.get(phase, 0))
    return own | {("kept",): numbers["kept",] + sum(kept.kinds.values())}


def _largest(processes: Sequence[Numbers]) -> Numbers:
    """Of each phase that of the process that needs most then: who keeps more borrows less."""
    found = dict(max(processes, key=lambda numbers: numbers["kept",]))
    for phase in {name[0] for name in found if len(name) > 1}:
        of_phase = ({n: size for n, size in each.items() if n[0] == phase} for each in processes)
        largest: Numbers = max(of_phase, key=lambda kinds: sum(kinds.values()))
        found |= largest
    return found


def _plan(
    asked: Asked, numbers: Numbers, events: tuple[tuple[int, int], ...] | None, depth: int
) -> MemoryPlan:
    anatomies = {
        phase: {kind: numbers.get((phase, kind), 0) for kind in ANATOMY}
        for phase in ORDER
        if any(name[0] == phase for name in numbers)
    }
    phases = {phase: sum(kinds.values()) for phase, kinds in anatomies.items()}
    where = max(phases, key=lambda phase: phases[phase])
    return MemoryPlan(
        phases=phases,
        peak_bytes=phases[where],
        peak_where=where,
        anatomies=anatomies,
        kept_bytes=numbers["kept",],
        host_bytes=numbers["host",],
        offloaded_bytes=numbers["offloaded",],
        flops_per_token=(numbers["flops",] - numbers["repeated",]) / asked.shape.tokens,
        flops=float(numbers["flops",] * asked.shape.micro_batches + numbers["update",]),
        fp8_flops=float(numbers["fp8",] * asked.shape.micro_batches),
        events=events,
        traced_layers=depth,
    )
