"""How often Python looks for garbage: seldom while a command loads, as usual while it works."""

import gc

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
