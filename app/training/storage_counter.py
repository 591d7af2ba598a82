"""Bytes of tensors: memory kept between steps, by part, and every storage when allocated and freed.

Works on real and on fake tensors, so that an estimate and a real step are counted by the same code.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from app.distributed.fsdp import has_dtensor, local
from app.layers.operations import cost_of
from app.model.training_model import TrainingModel
from app.optim.optimizers import stepped_by, steps_in_backward

_ALL_GATHERED = "fsdp::split_with_sizes_copy"
GATHERED = "gathered_weights"  # kind of the storages of weights gathered by FSDP
_ASKS_DEVICE = torch.ops.prim.device.default
_BLOCK_BYTES = 512  # rounding of the CUDA allocator; the same everywhere, so that counts can be compared

Event = tuple[int, int]  # serial of a storage, and its bytes: above 0 when allocated, below 0 when freed


def kept_bytes(model: TrainingModel, optimizer: Optimizer | None) -> dict[str, int]:
    """Return the bytes of this process by part; gradients as at the end of a step, none with in_backward or without an
    optimizer.
    """
    by_part = kept_tensors(model, optimizer)
    states = by_part.pop("optimizer_states")
    gradients = [] if optimizer is None or steps_in_backward(optimizer) else stepped_by(optimizer)
    tensors: dict[str, Iterable[Tensor]] = {**by_part, "gradients": gradients, "optimizer_states": states}
    return {part: sum(local(tensor).nbytes for tensor in tensors[part]) for part in tensors}


def kept_tensors(model: TrainingModel, optimizer: Optimizer | None) -> dict[str, list[Tensor]]:
    """Return the tensors by part, without gradients."""
    trained = {id(parameter) for parameter in model.trained().values()}
    weights = list(model.network.parameters())
    frozen = [weight for weight in weights if id(weight) not in trained]
    return {
        "frozen_weights": [*frozen, *model.network.buffers()],
        "quantization_constants": [] if model.quantizer is None else model.quantizer.constants(model.network),
        "trained_weights": [weight for weight in weights if id(weight) in trained],
        "optimizer_states": [] if optimizer is None else list(_tensors(optimizer.state.values())),
    }


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(value.values())
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for item in value:
            yield from _tensors(item)


# ---- every storage


def rounded(size: int) -> int:
    """Return the bytes allocated by the CUDA allocator for `size` bytes."""
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


class StorageCounter(TorchDispatchMode):
    """Context that counts storages of CPU tensors; results do not change.

    Earlier storages are counted if passed to `hold`; those passed to `ignore` never are. For DTensors the local
    tensors are counted. FSDP resizes storages of gathered weights without an operation: to their size before it
    copies into them, and to 0 when they are resharded.
    """

    def __init__(self, *, as_on_gpu: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.kinds: dict[int, str] = {}  # by serial, of storages passed to `hold` and of gathered weights
        self.phases: list[tuple[int, str]] = []  # by the index of their first event
        self.current = self.peak = 0
        self._as_on_gpu = as_on_gpu
        self._storages: dict[int, tuple[int, int, Any]] = {}  # by the address of the C++ storage
        self._gathered: dict[int, tuple[int, int]] = {}  # serial and bytes by address
        self._serial = 0

    def hold(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were allocated before."""
        for tensor in tensors:
            serial = self._see(local(tensor))
            if serial is not None:
                self.kinds[serial] = kind

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these tensors, nor views of them."""
        for tensor in tensors:
            self._add(local(tensor).untyped_storage(), 0)

    def enter(self, phase: str) -> None:
        """Start a phase: later events belong to it."""
        self._forget_resharded()
        self.phases.append((len(self.events), phase))

    def serial_of(self, tensor: Tensor) -> int | None:
        entry = self._storages.get(local(tensor).untyped_storage()._cdata)
        return None if entry is None else entry[0]

    def kind_of(self, tensor: Tensor) -> str | None:
        serial = self.serial_of(tensor)
        return None if serial is None else self.kinds.get(serial)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ASKS_DEVICE:  # most queries of autograd on a fake tensor; nothing is allocated
            return args[0].device
        if has_dtensor(types):
            return NotImplemented  # its operations on local tensors come back here
        self._forget_resharded()
        out = func(*args, **kwargs)
        for value in out if isinstance(out, list | tuple) else (out,):
            if isinstance(value, Tensor):
                self._see(value)
        name = func._overloadpacket._qualified_op_name
        if name == _ALL_GATHERED:
            self._see_gathered(kwargs["out"])
        cost = cost_of(name)
        taken = cost.gpu_bytes if self._as_on_gpu else cost.cpu_bytes
        if taken is not None:
            self._pass(taken(*args, **kwargs))
        return out

    def _see(self, tensor: Tensor) -> int | None:
        if tensor.device.type != "cpu":
            return None
        storage = tensor.untyped_storage()
        entry = self._storages.get(storage._cdata)
        if entry is not None:
            return entry[0]
        size = storage.nbytes()
        return self._add(storage, rounded(size)) if size else None

    def _see_gathered(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._see(tensor)
            address = tensor.untyped_storage()._cdata
            if address in self._storages:
                serial, size, _ = self._storages[address]
                self._gathered[address] = serial, size
                self.kinds[serial] = GATHERED

    def _forget_resharded(self) -> None:
        for address, (serial, size) in list(self._gathered.items()):
            entry = self._storages.get(address)
            if entry is None or entry[0] != serial:  # freed
                del self._gathered[address]
            elif entry[2]().nbytes() == 0:
                del self._gathered[address], self._storages[address]
                self._count(serial, -size)

    def _add(self, storage: Any, size: int) -> int:
        self._serial += 1
        serial, address = self._serial, storage._cdata
        self._storages[address] = serial, size, ref(storage, partial(self._gone, address, serial, size))
        self._count(serial, size)
        return serial

    def _gone(self, address: int, serial: int, size: int, _storage: Any) -> None:
        if self._storages.get(address, (None,))[0] == serial:
            del self._storages[address]
        self._count(serial, -size)

    def _pass(self, size: int) -> None:
        self._serial += 1
        self._count(self._serial, size)
        self._count(self._serial, -size)

    def _count(self, serial: int, size: int) -> None:
        if size:
            self.events.append((serial, size))
            self.current += size
            self.peak = max(self.peak, self.current)
