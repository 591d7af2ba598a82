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


def seconds_of_arithmetic(plan: MemoryPlan, machine: Machine) -> float:
    """Of a step. Without rates they are seconds of a machine with the rate 1: only their ratio means anything."""
    rate = machine.flops_per_second or 1.0
    in_fp8 = plan.fp8_flops / (machine.fp8_flops_per_second or rate)
    return (plan.flops - plan.fp8_flops) / rate + in_fp8


def bound(plan: MemoryPlan, shape: Shape, machine: Machine, precision: str) -> Bound | None:
    """None where the rate of the machine is not known."""
    if machine.flops_per_second is None or precision not in _RATED or not plan.flops:
        return None
    seconds = seconds_of_arithmetic(plan, machine)
    return Bound(seconds, shape.tokens * shape.micro_batches / seconds)
