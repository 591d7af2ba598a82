"""How often Python looks for garbage: seldom while a command loads, as usual while it works."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_USUAL = gc.get_threshold()


def look_seldom() -> None:
    """While modules are loaded, which make a million objects that all stay.

    Looking through them time and again costs a sixth of the start. It is not switched off: rows are rendered and
    tokenised in this time too, and what that leaves behind must not pile up.
    """
    gc.set_threshold(50_000, *_USUAL[1:])


def look_as_usual() -> None:
    """From the first step on; what is there by now is not looked through again."""
    gc.freeze()
    gc.set_threshold(*_USUAL)


@contextmanager
def not_looked_for() -> Iterator[None]:
    """Around what leaves next to none behind, and makes and drops objects by the million: a plan, 30 MB in all.

    What is there at its end is not looked through later either.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def leave_lying() -> None:
    """Before a command ends that has closed its files.

    Python looks through all objects several times as it ends, and takes modules apart one by one: more than a second
    once torch is loaded, for memory that the system takes back at once.
    """
    gc.freeze()
