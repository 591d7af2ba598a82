"""How fast a run can be at most: as if the machine did nothing but the arithmetic of the trace, at its full rate."""

from dataclasses import dataclass

from app.plan.machine import Machine
from app.plan.memory_plan import MemoryPlan, Shape

_RATED = ("bf16", "fp16", "auto")  # precisions of which the table has the rate


@dataclass(frozen=True, slots=True)
class Bound:
    """Of one process: no step is faster."""

    step_seconds: float
    tokens_per_second: float


def bound(plan: MemoryPlan, shape: Shape, machine: Machine, precision: str) -> Bound | None:
    """None where the rate of the machine is not known."""
    if machine.flops_per_second is None or precision not in _RATED or not plan.flops:
        return None
    seconds = plan.flops / machine.flops_per_second
    return Bound(seconds, shape.tokens * shape.micro_batches / seconds)
