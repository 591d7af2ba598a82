"""Workspaces of cuBLAS, which torch's allocator holds from the first products on."""

import torch

_HANDLES = 2  # the thread of the forward pass has one, that of the backward pass another
# Bytes of a handle by major compute capability, and elsewhere: `getChosenWorkspaceSize` of torch
_HANDLE_BYTES = {"9": 32 << 20, "10": 32 << 20}
_OTHER_HANDLE_BYTES = 8_519_680


def workspace_bytes(capability: str | None) -> int:
    """Return the bytes of all workspaces on a GPU of this compute capability."""
    major = (capability or "").partition(".")[0]
    return _HANDLES * _HANDLE_BYTES.get(major, _OTHER_HANDLE_BYTES)


def local_workspace_bytes() -> int:
    """Return the bytes of all workspaces on the GPU of this process, 0 without one."""
    return workspace_bytes(local_capability()) if torch.cuda.is_available() else 0


def local_capability() -> str:
    """Return the compute capability of the GPU of this process, as the `hardware` group has it."""
    return ".".join(map(str, torch.cuda.get_device_capability()))
