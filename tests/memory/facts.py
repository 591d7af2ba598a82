"""Handmade plans and machines."""

from dataclasses import replace
from typing import Any

from app.config.commands import HardwareConfig, all_hardware
from app.memory.estimate import Hardware, MemoryPlan
from app.memory.trace import MEMORY_KINDS

MIB = 1 << 20
GPU = Hardware("some", "Some GPU", "gpu", 1000 * MIB, 50 * MIB, True, 1e12, 1e11)


def plan(**parts: Any) -> MemoryPlan:
    """Plan with the given kinds of memory in MiB, or fields by name; all others are 0 or a default."""
    sizes = {name: round(parts.pop(name, 0) * MIB) for name in MEMORY_KINDS}
    peak = sum(sizes.values())
    fields: dict[str, Any] = {
        "phases": {"backward": peak},
        "peak_bytes": peak,
        "peak_where": "backward",
        "anatomy": sizes,
        "largest": sizes,
        "kept_bytes": 0,
        "host_bytes": 0,
        "flops_per_token": 1e6,
        "forward_flops": 5e5,
        "recomputed_flops": 0.0,
        "flops": 1e9,
        "fp8_flops": 0.0,
        "exact": False,
        "traced_layers": 2,
    }
    return MemoryPlan(**{**fields, **parts})


def gpu(name: str, **changes: Any) -> HardwareConfig:
    """The facts of a GPU of conf/hardware, some of them changed."""
    return replace(next(each for each in all_hardware() if each.name == name), **changes)
