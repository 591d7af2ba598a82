"""bitsandbytes, without the second that torch's compiler takes to load."""

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

_NAME = "bitsandbytes"


def import_bitsandbytes() -> None:
    """Before anything else imports it.

    It hands some functions to torch.compile as it is loaded, and that alone loads the compiler. Here each of them is
    compiled when it is called for the first time: a plan calls none, and a run few.
    """
    import torch

    if _NAME in sys.modules:
        return
    own = torch.compile
    torch.compile = _compiled_when_called  # type: ignore[assignment]
    try:
        import bitsandbytes  # noqa: F401
    finally:
        torch.compile = own


def _compiled_when_called(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """Stands in for torch.compile, as a decorator with options too."""
    if function is None:
        return partial(_compiled_when_called, **options)
    made: list[Callable[..., Any]] = []

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        import torch

        if not made:
            made.append(torch.compile(function, **options))
        return made[0](*args, **kwargs)

    return run
