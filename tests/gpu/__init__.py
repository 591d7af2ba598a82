"""What tests of the gpu tier share; torch must be loaded by then."""

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Inside, an operation that makes the host wait for the device raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this mode may miss some
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
