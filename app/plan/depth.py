"""A plan for many layers from traces of few.

At each place of a step, what is alive is affine in the number of layers that keep everything and in the number of
those that are computed again: the peak is the largest of these places, wherever it moves to. Nothing recomputed and
everything recomputed have places of their own, so traces are of the same sort as what they are for.
"""

from dataclasses import dataclass, replace

from app.model.outline import Outline
from app.plan.memory_plan import ANATOMY, MemoryPlan
from app.plan.stages import BETWEEN, ORDER
from app.plan.trace import Asked, Trace, trace

_FEW = 2  # layers of a sort: the first and the last are special
_NOT_WORTH_TWO = 5  # layers: the small traces have as many together
Numbers = dict[tuple[str, ...], int]


def planned(asked: Asked, outline: Outline, recompute: bool | int, *, exact: bool) -> MemoryPlan:
    """By one trace where there are few layers, or where they differ."""
    recomputed = outline.depth if recompute is True else int(recompute)
    plain = outline.depth - recomputed
    if exact or not outline.alike or outline.depth <= _NOT_WORTH_TWO:
        found = trace(asked, outline, plain, recomputed)
        return _plan(asked, _numbers(found), found.events, outline.depth)
    return _extrapolated(asked, outline, plain, recomputed)


def _extrapolated(asked: Asked, outline: Outline, plain: int, recomputed: int) -> MemoryPlan:
    few = _Depth(min(plain, _FEW), min(recomputed, _FEW))
    largest = trace(asked, outline, few.plain, few.recomputed)
    base = _numbers(largest)
    result = dict(base)
    for more, steps in (
        (_Depth(few.plain + 1, few.recomputed), plain - few.plain),
        (_Depth(few.plain, few.recomputed + 1), recomputed - few.recomputed),
    ):
        if steps:
            largest = trace(asked, outline, more.plain, more.recomputed)
            larger = _numbers(largest)
            for name in {**base, **larger}:
                slope = larger.get(name, 0) - base.get(name, 0)
                result[name] = result.get(name, 0) + steps * slope
    plan = _plan(asked, result, None, few.plain + few.recomputed + 1)
    return replace(plan, few_events=largest.events)


@dataclass(frozen=True, slots=True)
class _Depth:
    plain: int
    recomputed: int


def _numbers(found: Trace) -> Numbers:
    """All that a plan is made of, by name. Places between others are no larger than both, and some depths lack them."""
    numbers: Numbers = {
        (phase, kind): size for phase, kinds in found.phases.items() for kind, size in kinds.items()
    }
    numbers = {name: size for name, size in numbers.items() if name[0] != BETWEEN}
    return numbers | {
        ("kept",): found.kept,
        ("host",): found.host,
        ("flops",): found.flops,
        ("repeated",): found.repeated_flops,
    }


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
        flops_per_token=(numbers["flops",] - numbers["repeated",]) / asked.shape.tokens,
        flops=float(numbers["flops",] * asked.shape.micro_batches),
        events=events,
        traced_layers=depth,
    )
