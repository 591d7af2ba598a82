"""Whether a plan fits a machine: what lives at the peak, and what allocator and driver need on top of it."""

from dataclasses import dataclass

from app.plan.machine import Machine
from app.plan.memory_plan import MemoryPlan

_MARGIN = 0.03  # of the memory of the machine, for what no plan knows: other processes, kernels that are loaded late


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one process. `needed_bytes` is the sum of the first five."""

    peak_bytes: int  # what lives at most
    buckets_bytes: int  # gradients that data parallelism keeps where one process has none at its peak
    lost_bytes: int  # what the allocator takes beyond that
    context_bytes: int
    margin_bytes: int
    memory_bytes: int
    kept_bytes: int = (
        0  # of the peak, what is there whatever is recomputed and however small a micro-batch is
    )

    @property
    def reserved_bytes(self) -> int:
        """What torch takes from the device."""
        return self.peak_bytes + self.buckets_bytes + self.lost_bytes

    @property
    def needed_bytes(self) -> int:
        """With the driver's part and the margin."""
        return self.reserved_bytes + self.context_bytes + self.margin_bytes

    @property
    def fits(self) -> bool:
        """Into the whole memory of the machine."""
        return self.needed_bytes <= self.memory_bytes

    @property
    def is_hopeless(self) -> bool:
        """Whether weights, gradients and states alone are too much: then nothing else need be planned."""
        return self.kept_bytes + self.context_bytes + self.margin_bytes > self.memory_bytes


def judge(plan: MemoryPlan, machine: Machine, lost_bytes: int, processes: int = 1) -> Verdict:
    """`lost_bytes` are the allocator's."""
    return Verdict(
        peak_bytes=plan.peak_bytes,
        buckets_bytes=bucket_bytes(plan, processes),
        lost_bytes=lost_bytes,
        context_bytes=machine.context_bytes,
        margin_bytes=round(_MARGIN * machine.memory_bytes),
        memory_bytes=machine.memory_bytes,
        kept_bytes=plan.kept_bytes,
    )


def bucket_bytes(plan: MemoryPlan, processes: int) -> int:
    """Data parallelism keeps all gradients in buckets from step to step; one process has none while it computes forward
    and makes them one by one. At most what is missing of them at the peak: as large as what is trained, in its type.
    """
    if processes == 1 or plan.divided:
        return 0
    return max(0, plan.anatomy["trained_weights"] - plan.anatomy["gradients"])
