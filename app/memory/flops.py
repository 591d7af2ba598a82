"""FLOPs of a step, counted by torch's FlopCounterMode."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from app.layers.operations import COSTS


class _NoModuleTracker(AbstractContextManager["_NoModuleTracker"]):
    """Replaces torch's module tracker, which holds references to the whole autograd graph and its saved tensors."""

    parents = frozenset({"Global"})

    def __exit__(self, *_exception: object) -> None:
        pass


class StepFlops:
    """FLOPs of forward, backward and optimizer; counts while `mode` is entered."""

    def __init__(self) -> None:
        packets = ((_packet(name), cost.flops) for name, cost in COSTS.items())
        mapping = {packet: formula for packet, formula in packets if packet is not None and formula is not None}
        self.mode = FlopCounterMode(display=False, custom_mapping=mapping)
        self.mode.mod_tracker = _NoModuleTracker()  # type: ignore[assignment]
        self.in_backward = False
        self._recomputed = 0
        self._passes: int | None = None

    def count_recomputation(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the forward of a layer; whatever it computes during backward is recomputation."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before = self.mode.get_total_flops()
            try:
                return forward(*args, **kwargs)
            finally:
                if self.in_backward:
                    self._recomputed += self.mode.get_total_flops() - before

        return run

    def end_passes(self) -> None:
        """Count all later operations as the optimizer's."""
        if self._passes is None:
            self._passes = self.mode.get_total_flops()

    def totals(self, passes: int = 1) -> dict[str, int]:
        """FLOPs of one micro-batch, those of them in fp8 and recomputed, and FLOPs of the optimizer."""
        total = self.mode.get_total_flops()
        in_passes = total if self._passes is None else self._passes
        counts = self.mode.get_flop_counts().get("Global", {})
        in_fp8 = sum(counts.get(_packet(name), 0) for name, cost in COSTS.items() if cost.in_fp8)
        return {
            "flops": in_passes // passes,
            "fp8": in_fp8 // passes,
            "recomputed": self._recomputed // passes,
            "update": total - in_passes,
        }


def _packet(name: str) -> Any | None:
    """Operation of that name; None if its library is not loaded."""
    library, _, operation = name.partition("::")
    return getattr(getattr(torch.ops, library), operation, None)
