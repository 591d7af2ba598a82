"""What torch's allocator takes beyond what lives: simulated, and for layers that were not traced a share more."""

from app.plan.allocator import footprint
from app.plan.memory_plan import MemoryPlan

# Of what the layers that were not traced hold. 14 traces of 16 to 80 layers, of all recipes: the largest shares were
# 3.3 % with expandable segments and 11.4 % with native ones.
_MORE = {True: 0.04, False: 0.12}


def lost_bytes(plan: MemoryPlan, *, grow: bool) -> int:
    """`grow`: segments are expandable."""
    if plan.events is not None:
        return footprint(plan.events, grow=grow).lost_bytes
    few = footprint(plan.few_events, grow=grow)
    return few.lost_bytes + round(_MORE[grow] * max(0, plan.peak_bytes - few.allocated_bytes))
