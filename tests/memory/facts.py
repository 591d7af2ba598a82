"""Plans and machines made by hand."""

from typing import Any

from app.memory.estimate import MemoryPlan
from app.memory.fit import Machine
from app.memory.phases import ANATOMY

MIB = 1 << 20
GPU = Machine("some", "Some GPU", "gpu", 1000 * MIB, 50 * MIB, True, 1e12, 1e11)


def plan(**parts: Any) -> MemoryPlan:
    """Of the given parts, in MiB; all else is 0, or given by the name of its field."""
    sizes = {name: round(parts.pop(name, 0) * MIB) for name in ANATOMY}
    whole = sum(sizes.values())
    fields: dict[str, Any] = {
        "phases": {"backward": whole},
        "peak_bytes": whole,
        "peak_where": "backward",
        "anatomies": {"backward": sizes},
        "kept_bytes": 0,
        "host_bytes": 0,
        "flops_per_token": 1e6,
        "flops": 1e9,
        "fp8_flops": 0.0,
        "exact": False,
        "traced_layers": 2,
    }
    return MemoryPlan(**{**fields, **parts})
