"""What a recomputed layer keeps, its input, waits in the memory of the host, and is back before its turn.

Forward: the input is copied out beside the work of the layers. Backward: as one layer begins to be computed again, the
input of the layer below is on its way back, so that two inputs are on the device at a time. On a CPU the same copies
are made, and are the same memory.
"""

from contextlib import AbstractContextManager
from typing import Any
from weakref import ref

import torch
from torch import Tensor


class Host:
    """Where inputs wait. `device` is another one only in a plan, which has no memory to put them into."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._stream: Any = None
        self._away: list[ref[_Away] | None] = []  # by layer, of the newest pass
        self.bytes = 0  # of the newest pass

    def keeps(self, layer: int) -> AbstractContextManager[Any]:
        """Around the call of a layer that is recomputed; the lowest one is number 0."""
        self._away[layer:] = []
        self._away += [None] * (layer - len(self._away))
        if layer == 0:
            self.bytes = 0

        def pack(tensor: Tensor) -> Any:
            if len(self._away) > layer or tensor.ndim < 3 or not tensor.is_floating_point():
                return tensor  # a layer's input is its first tensor of states
            away = _Away(self._sent(tensor), tensor.device, self._away[layer - 1] if layer else None)
            self._away.append(ref(away))
            return away

        return torch.autograd.graph.saved_tensors_hooks(pack, self._unpacked)

    def _unpacked(self, given: Any) -> Tensor:
        if isinstance(given, Tensor):
            return given
        tensor, arrived = given.returned or self._fetched(given)
        given.returned = None
        below = given.below() if given.below is not None else None
        if below is not None and below.returned is None:
            below.returned = self._fetched(below)
        if arrived is not None:
            torch.cuda.current_stream(tensor.device).wait_event(arrived)
        result: Tensor = tensor
        return result

    def _sent(self, tensor: Tensor) -> Tensor:
        self.bytes += tensor.nbytes
        if tensor.device.type != "cuda":
            return torch.empty_like(tensor, device=self._device).copy_(tensor)
        waiting = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        beside = self._beside(tensor.device)
        with torch.cuda.stream(beside):
            waiting.copy_(tensor, non_blocking=True)
        tensor.record_stream(beside)
        return waiting

    def _fetched(self, away: "_Away") -> tuple[Tensor, Any]:
        """And the event to wait for. The room is made by the stream that uses it: what it was used for must be over."""
        room = torch.empty_like(away.waiting, device=away.device)
        if away.device.type != "cuda":
            return room.copy_(away.waiting), None
        beside = self._beside(away.device)
        with torch.cuda.stream(beside):
            room.copy_(away.waiting, non_blocking=True)
            arrived = beside.record_event()
        room.record_stream(beside)
        return room, arrived

    def _beside(self, device: torch.device) -> Any:
        """The stream of the copies, behind all that was asked for so far."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return self._stream


class _Away:
    """One input, on the host for as long as its layer's part of the graph lives."""

    __slots__ = ("__weakref__", "below", "device", "returned", "waiting")

    def __init__(self, waiting: Tensor, device: torch.device, below: "ref[_Away] | None") -> None:
        self.waiting, self.device, self.below = waiting, device, below
        self.returned: tuple[Tensor, Any] | None = None  # on its way back
