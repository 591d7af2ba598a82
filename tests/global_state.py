"""What a test may change for the whole process, and how it is put back: tests run in random order."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Environment, working directory, signal handlers, and the switches of the libraries that are loaded."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment())
        stack.enter_context(_directory())
        stack.enter_context(_handlers())
        stack.enter_context(_torch())
        stack.callback(_clear_singletons)
        yield


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


@contextlib.contextmanager
def _directory() -> Iterator[None]:
    before = Path.cwd()
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextlib.contextmanager
def _torch() -> Iterator[None]:
    """Only if torch is loaded already: a test about configuration must not pay for its import."""
    if "torch" not in sys.modules:
        yield
        return
    import torch

    switches = _switches_of_torch()
    before = [read() for read, _ in switches]
    try:
        yield
    finally:
        for (read, write), value in zip(switches, before, strict=True):
            if read() != value:  # some setters are slow: they load the compiler
                write(value)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _switches_of_torch() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """How each switch is read and written."""
    import torch

    cudnn = torch.backends.cudnn
    return [
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (lambda: cudnn.deterministic, lambda value: setattr(cudnn, "deterministic", value)),
        (lambda: cudnn.benchmark, lambda value: setattr(cudnn, "benchmark", value)),
    ]


def _clear_singletons() -> None:
    """Hydra refuses a second initialization, Accelerate a second precision."""
    if "hydra.core.global_hydra" in sys.modules:
        from hydra.core.global_hydra import GlobalHydra

        GlobalHydra.instance().clear()
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
