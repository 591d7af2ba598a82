"""What other processes hold of a GPU, asked of its driver before this one takes anything."""

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from app.engine.world import world

NVML = "libnvidia-ml.so.1"
_VERSION_2 = 2 << 24
_UNKNOWN = 2**64 - 1  # what the driver says where it may not tell
_OWN = 1 << 30  # at most what this process's own context takes, where only the sum is known
_LITTLE = 0.01  # of the memory, which is nothing to speak of


@dataclass(frozen=True, slots=True)
class Taken:
    """By others, in bytes. Containers do not see whose: then `processes` is empty."""

    total: int
    bytes: int
    processes: tuple[tuple[int, int | None], ...] = ()  # pid, and bytes where they are told

    @property
    def words(self) -> str:
        """For people."""
        each = ", ".join(
            f"pid {pid}" + ("" if size is None else f": {size / 1e9:.1f} GB") for pid, size in self.processes
        )
        by = f" ({each})" if each else ""
        return f"{self.bytes / 1e9:.1f} GB of {self.total / 1e9:.1f} GB are taken by other processes{by}"


def notes() -> list[str]:
    """A remark where a good part of the GPU is not there for this run."""
    taken = taken_by_others()
    return [] if taken is None or taken.bytes < _LITTLE * taken.total else [taken.words]


@cache
def taken_by_others() -> Taken | None:
    """Of the GPU of this process, as it was when first asked. None without a GPU, or where nobody tells."""
    if not torch.cuda.is_available():
        return None
    try:
        device = world().local_rank
        uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
        return asked_of_driver(uuid) or _asked_of_cuda(device)
    except (RuntimeError, AssertionError):
        return None


def _asked_of_cuda(device: int) -> Taken:
    """For drivers of another maker: no less than this is taken."""
    free, total = torch.cuda.mem_get_info(device)
    return Taken(total, max(0, total - free - _OWN))


class _Memory(ctypes.Structure):
    """nvmlMemory_v2_t."""

    _fields_ = [
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t, since version 2 of it."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


def asked_of_driver(uuid: str, library: str = NVML) -> Taken | None:
    """By NVML, which needs no context on the GPU; None where it is missing or says no."""
    try:
        nvml = ctypes.CDLL(library)
        if not uuid or nvml.nvmlInit_v2() != 0:
            return None
        try:
            return _of_device(nvml, uuid)
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):  # no library, or one without these functions
        return None


def _of_device(nvml: ctypes.CDLL, uuid: str) -> Taken | None:
    device = _handle(nvml, uuid)
    memory = _Memory(version=ctypes.sizeof(_Memory) | _VERSION_2)
    if device is None or nvml.nvmlDeviceGetMemoryInfo_v2(device, ctypes.byref(memory)) != 0:
        return None
    processes = dict(_processes(nvml, device))
    own = processes.pop(os.getpid(), None) or 0
    return Taken(memory.total, max(0, memory.used - own), tuple(sorted(processes.items())))


def _handle(nvml: ctypes.CDLL, uuid: str) -> ctypes.c_void_p | None:
    for kind in ("GPU", "MIG"):
        device = ctypes.c_void_p()
        name = ctypes.c_char_p(f"{kind}-{uuid}".encode())
        if nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(device)) == 0:
            return device
    return None


def _processes(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> Iterator[tuple[int, int | None]]:
    count = ctypes.c_uint(0)
    nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), None)  # says how many
    room = count.value + 8  # some may start meanwhile
    found, count = (_Process * room)(), ctypes.c_uint(room)
    if nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), found) == 0:
        for each in found[: count.value]:
            yield each.pid, None if each.used == _UNKNOWN else each.used
