"""PEFT, without what it does that a run has no use for."""

import contextlib
import sys
import warnings
from collections.abc import Iterator

_UNUSED = "bitsandbytes"


@contextlib.contextmanager
def lean_peft() -> Iterator[None]:
    """Around every import of PEFT and every use of it that looks for layers to adapt.

    PEFT imports bitsandbytes wherever it is installed, and that brings torch's compiler: a second of a start that has
    four. As long as nothing else has imported it, no layer can be one of its layers, and PEFT is told that it is not
    there. What is going to quantise imports it first (`model.quantize`).
    """
    with _quiet():
        if _UNUSED in sys.modules:
            yield
            return
        sys.modules[_UNUSED] = None  # type: ignore[assignment]  # Python's own way to say that it cannot be imported
        try:
            yield
        finally:
            sys.modules.pop(_UNUSED, None)
            _forget_answers()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """PEFT asks transformers for a name that transformers has since changed: nothing that a user could mend."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield


def _forget_answers() -> None:
    """PEFT keeps what it found out about installed packages; a later model of this process may be quantised."""
    asked = sys.modules.get("peft.import_utils")
    for name, question in vars(asked).items() if asked else ():
        if name.startswith("is_bnb") and hasattr(question, "cache_clear"):
            question.cache_clear()
