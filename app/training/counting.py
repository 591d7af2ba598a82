"""Bytes of tensors as they come and go: a mode that sees every storage that is made, of real tensors or fake ones."""

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from app.model.hidden import HIDDEN, Hidden

_ASKS_DEVICE = torch.ops.prim.device.default
_BLOCK = 512  # what an allocator of CUDA rounds up to; the same everywhere, so that counts can be compared


Event = tuple[int, int]  # which storage, and its bytes: above 0 as it comes, below as it goes


def rounded(size: int) -> int:
    """Bytes that an allocator of CUDA takes for so many."""
    return -(-size // _BLOCK) * _BLOCK


class StorageCounter(TorchDispatchMode):
    """Counts while it is entered; changes nothing that is computed.

    What was there before is counted if it is given to `hold`, and what `ignore` was given never is.
    """

    def __init__(self, device: str, hidden: Hidden = HIDDEN) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.kinds: dict[int, str] = {}  # of what is held
        self.phases: list[tuple[int, str]] = []  # from which event on
        self.current = self.peak = 0
        self._device = device
        self._hidden = hidden
        self._known: dict[int, tuple[int, int, Any]] = {}  # by the address of its C++ object
        self._serial = 0

    def hold(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count what was made before."""
        for tensor in tensors:
            serial = self._see(tensor)
            if serial is not None:
                self.kinds[serial] = kind

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these, nor views of them."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._keep_in_mind(storage, 0)

    def enter(self, phase: str) -> None:
        """What comes now belongs to it."""
        self.phases.append((len(self.events), phase))

    def serial_of(self, tensor: Tensor) -> int | None:
        """Of its storage, by which events name it."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let it happen, and look at what came out."""
        kwargs = kwargs or {}
        if func is _ASKS_DEVICE:  # most of what autograd asks of a fake tensor, and nothing is made
            return args[0].device
        out = func(*args, **kwargs)
        for each in out if isinstance(out, list | tuple) else (out,):
            if isinstance(each, Tensor):
                self._see(each)
        hidden = self._hidden.get(func._overloadpacket._qualified_op_name)
        if hidden is not None:
            self._pass(hidden(*args, **kwargs))
        return out

    def _see(self, tensor: Tensor) -> int | None:
        if tensor.device.type != self._device:
            return None
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is not None:
            return known[0]
        size = storage.nbytes()
        return self._keep_in_mind(storage, rounded(size)) if size else None

    def _keep_in_mind(self, storage: Any, size: int) -> int:
        self._serial += 1
        serial, address = self._serial, storage._cdata
        self._known[address] = serial, size, ref(storage, partial(self._gone, address, serial, size))
        self._count(serial, size)
        return serial

    def _gone(self, address: int, serial: int, size: int, _storage: Any) -> None:
        if self._known.get(address, (None,))[0] == serial:
            del self._known[address]
        self._count(serial, -size)

    def _pass(self, size: int) -> None:
        """What an operation takes and gives back before it returns."""
        self._serial += 1
        self._count(self._serial, size)
        self._count(self._serial, -size)

    def _count(self, serial: int, size: int) -> None:
        if size:
            self.events.append((serial, size))
            self.current += size
            self.peak = max(self.peak, self.current)
