"""Numbers as people read them; what is no number that can be drawn is None."""

import math
from collections.abc import Callable
from typing import Any

NOTHING = "-"
_LARGEST = 1e150  # squares and differences of what is smaller can still be computed


def number(value: Any) -> float | None:
    """What can be put into a chart, whatever a file said."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _LARGEST else None  # false for what is not a number too


def formatted(value: Any, words: Callable[[float], str | None], absent: str | None = None) -> str | None:
    """A number in words; `absent` where it is none."""
    known = number(value)
    return absent if known is None else words(known)


def figure(value: float) -> str:
    """Five digits that matter: 3.6259, 0.00040, 1.2e-07, 79,146."""
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e7 or size < 1e-4:
        mantissa, _, power = f"{value:.4g}".partition("e")
        return f"{mantissa}e{int(power)}" if power else mantissa
    if size >= 1000:
        return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"
    text = f"{value:.{4 if size >= 1 else 3 - math.floor(math.log10(size))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def whole(value: Any) -> str | None:
    """A count."""
    return formatted(value, "{:,.0f}".format)
