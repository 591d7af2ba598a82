"""Triton kernels, and beside each the same arithmetic in plain torch. Triton is imported when a kernel is started."""

import importlib.util
from functools import cache

import torch

_LEAST_CAPABILITY = (8, 0)  # what Triton supports, and has bf16


@cache
def can_run(device: torch.device) -> bool:
    """Whether kernels are used for tensors of this device."""
    if device.type != "cuda" or torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
