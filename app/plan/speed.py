"""How fast a run can be at most: as if the machine did nothing but the arithmetic of the trace, at its full rate."""

from dataclasses import dataclass

from app.config.schema import RunConfig
from app.plan.machine import Machine
from app.plan.memory_plan import MemoryPlan, Shape

_UNPACKED = 2.5  # bytes moved to unpack a 4-bit weight into bf16, beyond what computing with bf16 ones moves
_OVER_THE_BUS = 50e9  # bytes a second, of PCIe 5 with pinned memory
_IN_FORWARD = 0.25  # of the arithmetic, at least
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


def seconds_per_token(run: RunConfig, plan: MemoryPlan, tokens: int, machine: Machine) -> float:
    """Of arithmetic, of unpacking weights where the machine's bandwidth is known, and of what nothing goes on beside.

    Only its ratio means anything.
    """
    seconds = seconds_of_arithmetic(plan, machine)
    if machine.bytes_per_second and run.quantization.kind != "none":
        uses = run.batching.accumulation * (2 + _recomputed_share(run))
        seconds += uses * _packed_weights(run, plan) * _UNPACKED / machine.bytes_per_second
    seconds += run.batching.accumulation * _waiting(plan, seconds / run.batching.accumulation)
    return seconds / (tokens * run.batching.accumulation)


def _waiting(plan: MemoryPlan, seconds: float) -> float:
    """For copies between device and host that take longer than the arithmetic beside them, of a micro-batch."""
    once = plan.offloaded_bytes / _OVER_THE_BUS
    return max(0.0, once - _IN_FORWARD * seconds) + max(0.0, once - (1 - _IN_FORWARD) * seconds)


def _packed_weights(run: RunConfig, plan: MemoryPlan) -> float:
    """From their constants: a scale for each 64, of 8 bits with double quantisation, else of 32."""
    return plan.anatomy["quantization_constants"] * (63.0 if run.quantization.double_quant else 16.0)


def _recomputed_share(run: RunConfig) -> float:
    asked, layers = run.training.recompute, int(run.model.architecture.get("num_hidden_layers", 0))
    if isinstance(asked, bool) or not layers:
        return float(bool(asked))
    return min(1.0, int(asked) / layers)
