"""The micro-batches of a step, made while the device is busy with the step before.

Pages of the host that are pinned are what a device copies by itself: from others the host would wait until all that it
has asked for so far is done, at the first micro-batch of each step. A stream of their own would not pay: a micro-batch
is ids and positions, some hundred kilobytes, which take as long as a hundred-thousandth of the step.
"""

from collections.abc import Callable

import torch

from app.batch import Batch


class Ahead:
    """`make` is a pure function of the step, so one that was made for nothing, because the run stops, is no loss."""

    def __init__(self, make: Callable[[int], list[Batch]], device: torch.device) -> None:
        self._make = make
        self._pins = device.type == "cuda"
        self._ready: tuple[int, list[Batch]] | None = None

    def batches(self, step: int) -> list[Batch]:
        """Of `step`."""
        ready, self._ready = self._ready, None
        return ready[1] if ready is not None and ready[0] == step else self._made(step)

    def prepare(self, step: int) -> None:
        """They will be asked for next."""
        self._ready = step, self._made(step)

    def _made(self, step: int) -> list[Batch]:
        batches = self._make(step)
        return [batch.pinned() for batch in batches] if self._pins else batches
