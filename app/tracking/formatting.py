"""Format numbers, steps and samples as text for console, log, pages and model card."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NO_VALUE = "-"
# phases of a training step, by their keys in metrics.jsonl and result.json
PHASES = {
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "optimizer_seconds": "optimizer",
    "data_seconds": "waiting for data",
}
_MAX_DATA_SHARE = 0.05  # of a step
_MIN_SHOWN_BYTES = 100_000_000  # of other processes
_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"


@dataclass(frozen=True, slots=True)
class Sample:
    """An eval prompt, the expected answer and the answer of the model."""

    prompt: str
    expected: str
    answer: str
    likelihood: float | None = None  # of an answer that is a label

    @property
    def answer_text(self) -> str:
        """The answer, with its likelihood if available."""
        return self.answer if self.likelihood is None else f"{self.answer} ({self.likelihood:.0%})"


def align(rows: Sequence[tuple[str, str]], width: int = 0, gap: int = 2) -> str:
    """Align names and values in two columns, the first at least `width`; further lines of a value are indented."""
    width = max(width, *(len(name) + gap for name, _ in rows if name), 0)
    return "\n".join(f"{name:<{width}}{value}".replace("\n", "\n" + " " * width) for name, value in rows)


def align_columns(rows: Sequence[Sequence[str]], gap: int = 3) -> str:
    """Return a table of cells, each column as wide as its longest cell."""
    widths = [max(map(len, column)) + gap for column in zip(*rows, strict=True)]
    lines = ["".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def truncate(text: str, width: int, *, at_end: bool = True) -> str:
    """Return one line of at most `width` characters, truncated at its end or at its start, between words if possible.

    A word is cut if the line would otherwise lose more than half of its width.
    """
    line = " ".join(text.split())
    if len(line) <= width:
        return line
    text, cut_off = (line[: width - 1], line[width - 1]) if at_end else (line[1 - width :], line[-width])
    words = text if cut_off == " " else text.rpartition(" ")[0] if at_end else text.partition(" ")[2]
    text = (words if len(words) >= width // 2 else text).strip()
    return text + _ELLIPSIS if at_end else _ELLIPSIS + text


def step_line(values: Mapping[str, Any], total: int | None, seconds_left: float | None) -> str:
    """Return the log line of a training step."""
    position = f"step {values['step']}" + (f"/{total}" if total else "")
    return " | ".join([position, *_parts({**values, "left": seconds_left}, _STEP_PARTS).values()])


def bar_text(values: Mapping[str, Any], width: int) -> str:
    """Return the numbers next to the bar; the least important ones are omitted until they fit in `width`."""
    parts = _parts(values, _BAR_PARTS)
    for key in _LEAST_IMPORTANT:
        if len(" | ".join(parts.values())) > width:
            parts.pop(key, None)
    return " | ".join(parts.values())


def _parts(values: Mapping[str, Any], formatters: Mapping[str, Callable[[float], str]]) -> dict[str, str]:
    """Format the numbers that are there."""
    return {key: formatter(values[key]) for key, formatter in formatters.items() if values.get(key) is not None}


def data_wait(values: Mapping[str, Any]) -> str | None:
    """Return a sentence if waiting for data takes more than 5% of a step, else None."""
    seconds = [finite_number(values.get(key)) or 0.0 for key in PHASES]
    share = (finite_number(values.get("data_seconds")) or 0.0) / (sum(seconds) or 1.0)
    if share <= _MAX_DATA_SHARE:
        return None
    return f"waiting for data takes {share:.0%} of each step: keep cache_dir on a local disk and a CPU core free"


def evaluation_line(values: Mapping[str, Any]) -> str:
    """Return the log line of an evaluation."""
    shown = {key: value for key, value in values.items() if key not in {"step", "epoch"}}
    numbers = [f"{key} {value:.4f}" if isinstance(value, float) else f"{key} {value}" for key, value in shown.items()]
    return " | ".join([f"evaluation at step {values['step']}", *numbers])


def samples_text(step: int, samples: Sequence[Sample]) -> str:
    """Return all samples as text."""
    blocks = [
        align([("prompt", sample.prompt), ("expected", sample.expected), ("answer", sample.answer_text)])
        for sample in samples
    ]
    return f"samples at step {step}\n" + "\n\n".join(blocks)


def format_count(number: float) -> str:
    """Format 12345 as 12.3k; a number below 100 keeps three digits."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.3g}" if abs(number) < 100 else f"{number:.0f}"


def format_bytes(number: float) -> str:
    """Format as GB or MB, in powers of ten."""
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"


def format_others(others: Mapping[str, int]) -> str:
    """Format GPU memory of other processes, e.g. as "19.0 GB by 2 other processes"; empty if it is nearly none."""
    size, count = others.get("bytes", 0), others.get("count", 0)
    if size < _MIN_SHOWN_BYTES:
        return ""
    return f"{format_bytes(size)} by {f'{count:,} ' if count else ''}other process{'es' * (count != 1)}"


def speedup_line(entry: Mapping[str, Any]) -> str:
    """Return a faster setting with its estimated memory, the gain of the upper bound of the speed, and the reason."""
    memory = format_bytes(entry["needed_bytes"])
    return f"{entry['override']}: {memory}, upper bound {entry['bound']:.2f}x ({entry['why']})"


def format_duration(seconds: float) -> str:
    """Format 3725 as 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def format_number(value: float) -> str:
    """Format with five significant digits: 3.6259, 0.00040, 1.2e-07, 79,146."""
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


def finite_number(value: Any) -> float | None:
    """Return a value read from a file as float, or None if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def format_or(value: Any, formatter: Callable[[float], str | None], absent: str | None = None) -> str | None:
    """Format a value read from a file by `formatter`; return `absent` if it is not a finite number."""
    number = finite_number(value)
    return absent if number is None else formatter(number)


def format_integer(value: Any) -> str | None:
    """Format a count read from a file."""
    return format_or(value, "{:,.0f}".format)


_STEP_PARTS: dict[str, Callable[[float], str]] = {
    "loss": "loss {:.4f}".format,
    "lr": "lr {:.2e}".format,
    "grad_norm": "grad_norm {:.2f}".format,
    "tokens_per_second": lambda number: f"{format_count(number)} tokens/s",
    "samples_per_second": lambda number: f"{format_count(number)} samples/s",
    "left": lambda seconds: f"{format_duration(seconds)} left",
}
_BAR_PARTS: dict[str, Callable[[float], str]] = {
    "loss": _STEP_PARTS["loss"],
    "lr": _STEP_PARTS["lr"],
    "gpu_memory_bytes": lambda number: f"GPU {number / 1e9:.1f} GB",
    "tokens_per_second": _STEP_PARTS["tokens_per_second"],
    "elapsed": lambda seconds: f"{format_duration(seconds)} elapsed",
    "left": _STEP_PARTS["left"],
}
_LEAST_IMPORTANT = ("gpu_memory_bytes", "lr", "elapsed", "tokens_per_second", "left")  # the first is omitted first
