"""What the model answered before the first step and what it answers now, side by side."""

from collections.abc import Sequence
from pathlib import Path

from app.record.lines import Sample
from app.record.metrics import read_lines

_WIDTHS = (40, 20, 28, 28)
_CUT = "\N{HORIZONTAL ELLIPSIS}"


def before_after(samples: Path) -> str | None:
    """A table of samples.jsonl, or None if the file does not tell both."""
    by_step: dict[int, list[Sample]] = {}
    for line in read_lines(samples) if samples.exists() else ():
        given = {key: line[key] for key in ("prompt", "expected", "answer", "likelihood") if key in line}
        sample = Sample(**given)
        by_step.setdefault(line["step"], []).append(sample)
    last = max(by_step, default=0)
    if 0 not in by_step or last == 0:
        return None
    rows = [
        (_end(before.prompt, _WIDTHS[0]), before.expected, before.given, after.given)
        for before, after in zip(by_step[0], by_step[last], strict=False)
        if before.prompt == after.prompt
    ]
    return _table([("held out", "expected", "before", f"after step {last}"), *rows]) if rows else None


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    cells = [
        [_start(" ".join(text.split()), width) for text, width in zip(row, _WIDTHS, strict=True)]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def _start(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + _CUT


def _end(text: str, width: int) -> str:
    """Of a conversation the end is what was asked."""
    flat = " ".join(text.split())
    return flat if len(flat) <= width else _CUT + flat[1 - width :]
