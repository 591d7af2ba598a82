"""Triton kernels, and beside each the same arithmetic in plain torch. Triton is imported when a kernel is started.

An operation of `torch.ops.app_kernels` is the kernel on a GPU and the plain arithmetic on a CPU; a plan, whose tensors
have no memory, sees what the kernel takes besides: nothing.
"""

import contextlib
import importlib.util
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache

import torch

_LEAST_CAPABILITY = (8, 0)  # what Triton supports, and has bf16

_as_on_gpu: ContextVar[bool] = ContextVar("as_on_gpu", default=False)


@cache
def can_run(device: torch.device) -> bool:
    """Whether kernels are used for tensors of this device."""
    if device.type != "cuda" or torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def taken_by(device: torch.device) -> bool:
    """Whether the ways that end in kernels are taken there."""
    return _as_on_gpu.get() or can_run(device)


def on_gpu(device: torch.device) -> bool:
    """Whether the ways of a GPU are taken there, kernels or not."""
    return _as_on_gpu.get() or device.type == "cuda"


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """Inside, a CPU takes the ways of a GPU: for plans, whose tensors are the CPU's, and for tests."""
    before = _as_on_gpu.set(True)
    try:
        yield
    finally:
        _as_on_gpu.reset(before)
