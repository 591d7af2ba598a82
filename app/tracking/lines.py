"""What people read, as plain text."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_CUT = "\N{HORIZONTAL ELLIPSIS}"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Sample:
    """A held-out prompt, the answer that the data has, and the one that the model gave."""

    prompt: str
    expected: str
    answer: str
    likelihood: float | None = None  # of an answer that is a label

    @property
    def given(self) -> str:
        """The answer, and how likely it was to the model."""
        return self.answer if self.likelihood is None else f"{self.answer} ({self.likelihood:.0%})"


def aligned(rows: Sequence[tuple[str, str]], width: int = 0) -> str:
    """Names and values in two columns, the first at least `width`; further lines of a value stand below its first."""
    width = max(width, *(len(name) + 2 for name, _ in rows), 2)
    return "\n".join(f"{name:<{width}}{value}".replace("\n", "\n" + " " * width) for name, value in rows)


def columns(rows: Sequence[Sequence[str]], gap: int = 3) -> str:
    """Cells one below the other, each column as wide as its longest."""
    widths = [max(map(len, column)) + gap for column in zip(*rows, strict=True)]
    lines = ["".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def shortened(text: str, width: int, *, at_end: bool = True) -> str:
    """One line of at most `width` characters, cut at its end or at its beginning."""
    flat = " ".join(text.split())
    if len(flat) <= width:
        return flat
    return flat[: width - 1] + _CUT if at_end else _CUT + flat[1 - width :]


def step_parts(values: Mapping[str, Any], seconds_left: float | None) -> list[str]:
    """What is known of a step, each with its name; a number that is missing is left out."""
    parts = [text(values[key]) for key, text in _STEP_PARTS.items() if values.get(key) is not None]
    return parts if seconds_left is None else [*parts, f"{duration(seconds_left)} left"]


def step_line(values: Mapping[str, Any], total: int | None, seconds_left: float | None) -> str:
    """One line of a log."""
    place = f"step {values['step']}" + (f"/{total}" if total else "")
    return " | ".join([place, *step_parts(values, seconds_left)])


def evaluation_line(values: Mapping[str, Any]) -> str:
    """One line of a log."""
    numbers = [f"{key} {_plain(value)}" for key, value in values.items() if key not in {"step", "epoch"}]
    return " | ".join([f"evaluation at step {values['step']}", *numbers])


def samples_text(step: int, samples: Sequence[Sample]) -> str:
    """All samples, one below the other."""
    blocks = [
        aligned([("prompt", each.prompt), ("expected", each.expected), ("answer", each.given)])
        for each in samples
    ]
    return printable(f"samples at step {step}\n" + "\n\n".join(blocks))


def printable(text: str) -> str:
    """Without the control characters by which a model's answer could rewrite the screen."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def quantity(number: float) -> str:
    """12345 as 12.3k."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def memory(number: float) -> str:
    """Bytes as GB or MB, in powers of ten."""
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"


def duration(seconds: float) -> str:
    """3725 as 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _plain(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


_STEP_PARTS: dict[str, Callable[[float], str]] = {
    "loss": "loss {:.4f}".format,
    "lr": "lr {:.2e}".format,
    "grad_norm": "gradient {:.2f}".format,
    "tokens_per_second": lambda number: f"{quantity(number)} tokens/s",
    "peak_memory_bytes": memory,
}
